package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// errDrained says that the drive stopped between two steps because it was asked to.
var errDrained = errors.New("drained")

// drive is one run being driven. run owns everything but the board and the two ways to stop it.
type drive struct {
	cfg   Config
	deps  Deps
	log   *slog.Logger
	spec  *learnerv1.StartRunRequest
	set   settings
	board *board

	weights  *weightsv1.WeightsManifest // newest published
	mark     time.Time                  // when the last step was committed; zero where something else came since
	delivery float64                    // seconds that the last delivery took
	flat     int                        // steps in a row in which the rewards of every group were equal
	flatTell int                        // at how many of them somebody is told next
	learners learners
	fleet    *fleet

	drain     chan struct{} // closed: stop between two steps
	drainOnce sync.Once
	halt      context.Context // ends when it is to stop now, launched or not
	stopNow   context.CancelFunc
	done      chan struct{} // closed when run returned
}

func newDrive(cfg Config, deps Deps, spec *learnerv1.StartRunRequest, weights *weightsv1.WeightsManifest) *drive {
	set := settingsOf(spec)
	d := &drive{
		cfg: cfg, deps: deps, spec: spec, set: set, weights: weights,
		log:   deps.Log.With("run", spec.GetRunId()),
		board: newBoard(&learnerv1.Progress{RunId: spec.GetRunId(), Phase: preparing, TotalSteps: set.steps, Weights: weights}),
		drain: make(chan struct{}), done: make(chan struct{}),
	}
	d.halt, d.stopNow = context.WithCancel(context.Background())
	d.fleet = newFleet(spec.GetRunId(), spec.GetIncarnation(), deps.Dial, cfg.Retry, d.fenced)
	d.fleet.offers = set.offers(spec.GetRunId())
	return d
}

// run drives until the last step, a failure, or work ends, which is a stop. When life ends, work ends with it; then the
// drive stays active and goes on after a restart.
func (d *drive) run(life, work context.Context) {
	defer close(d.done)
	watch, cancel := context.WithCancel(life)
	var wg sync.WaitGroup
	defer func() { cancel(); wg.Wait() }()
	workers := d.deps.Registry.Watch(watch, names.WorkerService("inference"))
	wg.Go(func() { d.fleet.serve(watch, workers) })
	d.learners = learners{run: d.spec.GetRunId(), incarnation: d.spec.GetIncarnation(), updates: d.deps.Registry.Watch(watch, names.WorkerService("learner"))}

	err := d.drive(work)
	if life.Err() != nil {
		d.save(context.WithoutCancel(life), true)
		return
	}
	d.end(life, err, work.Err() != nil)
}

// stop ends the drive, with drain between two steps, and returns when it has ended.
func (d *drive) stop(ctx context.Context, drain bool) error {
	d.drainOnce.Do(func() { close(d.drain) })
	if !drain {
		d.stopNow()
	}
	select {
	case <-d.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (d *drive) phase() learnerv1.Phase {
	p, _ := d.board.read()
	return p.GetPhase()
}

// drive holds one session with a learner after the other.
func (d *drive) drive(ctx context.Context) error {
	for {
		if d.save(ctx, true) { // before a learner is touched
			return errTaken
		}
		err := d.session(ctx)
		if !errors.Is(err, errLost) || ctx.Err() != nil {
			return err
		}
		d.log.WarnContext(ctx, "the learner was lost; its state will be made again", "error", err)
		d.enter(recovering, "a learner worker (scheduler restarts it)")
	}
}

// session works with one learner, until that is lost.
func (d *drive) session(ctx context.Context) error {
	l, err := d.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = l.conn.Close() }()
	d.fleet.from(l)
	defer d.fleet.from(nil)
	with, end := d.learners.guard(ctx, l)
	defer end()
	err = d.work(with, l)
	if cause := context.Cause(with); err != nil && errors.Is(cause, errLost) {
		return cause // whatever ended with it is done again
	}
	return err
}

// work prepares a learner and makes steps with it.
func (d *drive) work(ctx context.Context, l *learner) error {
	d.mark = time.Time{}
	step, err := d.prepare(ctx, l)
	if err != nil {
		return err
	}
	for !d.set.last(step) {
		if d.draining() {
			return d.leave(ctx, l, step)
		}
		if err := d.step(ctx, l, step+1); err != nil {
			if errors.Is(err, errDrained) {
				return d.leave(ctx, l, step)
			}
			return err
		}
		step++
	}
	return nil
}

// leave takes a last snapshot, so that a resumed run repeats nothing.
func (d *drive) leave(ctx context.Context, l *learner, step uint64) error {
	if step > 0 && !d.set.snapshots(step) {
		if err := d.snapshot(ctx, l, step); err != nil {
			return err
		}
	}
	return errDrained
}

func (d *drive) draining() bool {
	select {
	case <-d.drain:
		return true
	default:
		return false
	}
}

// end records how the drive ended and tells the scheduler.
func (d *drive) end(ctx context.Context, err error, cancelled bool) {
	if errors.Is(err, errTaken) || err != nil && d.save(ctx, true) {
		d.log.WarnContext(ctx, "the run is left to the controller that leads", "error", err)
		return
	}
	phase, report := finished, &runv1.CompleteRunRequest{
		RunId: d.spec.GetRunId(), Incarnation: d.spec.GetIncarnation(), State: runv1.RunState_RUN_STATE_SUCCEEDED,
	}
	switch {
	case err == nil:
	case errors.Is(err, errDrained), cancelled:
		phase, report = stopped, nil
	case refusal.Is(rpcerr.Reason(err)): // it stands where it stood before the step, and somebody may have it tried again
		phase, report.State, report.Reason, report.Message = stopped, runv1.RunState_RUN_STATE_PAUSED, rpcerr.Reason(err), rpcerr.Text(err)
		d.log.InfoContext(ctx, "the run is paused", "reason", report.Reason, "error", err)
	default:
		phase, report.State, report.Message = failed, runv1.RunState_RUN_STATE_FAILED, rpcerr.Text(err)
		if report.Reason = rpcerr.Reason(err); report.Reason == "" {
			report.Reason = ReasonStep
		}
		d.log.InfoContext(ctx, "the run can't go on", "reason", report.Reason, "error", err) // the scheduler tells the world
	}
	d.board.update(func(p *learnerv1.Progress) {
		p.Phase, p.WaitingFor = phase, ""
		if phase == failed {
			p.Message = rpcerr.Text(err)
		}
	})
	d.emitPhase()
	d.flush(ctx)
	if taken := d.save(ctx, report != nil); taken || report == nil { // a report that is not delivered is delivered after a restart
		return
	}
	crashpoint.Here("controller/finished") // the end is remembered, the scheduler does not know
	if _, err := call(ctx, d, "scheduler", func(ctx context.Context) (*runv1.CompleteRunResponse, error) {
		return d.deps.Scheduler.CompleteRun(ctx, report)
	}); err != nil {
		d.log.ErrorContext(ctx, "the scheduler does not take the end of the run", "error", err)
		return
	}
	crashpoint.Here("controller/reported") // the scheduler knows, we would tell it again
	d.save(ctx, false)
}

// save writes the drive; it is a hint for the next process, so a failure is logged and no more. taken says that another controller
// leads, or that the run was begun again: it is another's, and whatever this one learns of it must be told to nobody.
func (d *drive) save(ctx context.Context, active bool) (taken bool) {
	p, _ := d.board.read()
	err := d.deps.Store.Save(ctx, &Drive{Spec: d.spec, Phase: p.GetPhase(), Step: p.GetStep(), Active: active, Weights: d.weights})
	if err != nil {
		d.log.WarnContext(ctx, "the drive's state was not saved", "error", err)
	}
	return errors.Is(err, lease.ErrFenced) || errors.Is(err, ErrStale)
}

// errTaken ends a drive that another controller has taken over.
var errTaken = errors.New("another controller leads and drives the run")

// enter moves to a phase and says what it waits for.
func (d *drive) enter(phase learnerv1.Phase, waiting string) {
	before, _ := d.board.read()
	d.board.update(func(p *learnerv1.Progress) { p.Phase, p.WaitingFor = phase, waiting })
	if before.GetPhase() != phase {
		d.emitPhase()
	}
}

func (d *drive) waiting(format string, args ...any) {
	d.board.update(func(p *learnerv1.Progress) { p.WaitingFor = fmt.Sprintf(format, args...) })
}

// call makes a call to a service and repeats it while the service does not answer.
func call[T any](ctx context.Context, d *drive, owner string, fn func(ctx context.Context) (T, error)) (T, error) {
	pause := d.cfg.Retry
	for {
		out, err := fn(ctx)
		if err == nil || ctx.Err() != nil || !transient(err) {
			return out, err
		}
		d.waiting("%s to answer: %s", owner, rpcerr.Text(err))
		sleep(ctx, pause)
		pause = min(2*pause, 20*d.cfg.Retry)
	}
}

func transient(err error) bool {
	switch rpcerr.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Aborted, codes.ResourceExhausted, codes.Canceled: // Canceled: a connection that was closed, as our own context still lives
		return true
	}
	return false
}
