package controller

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/worker"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/controller/gate"
)

// errTaken ends a drive that another controller has taken over, or whose run was started again.
var errTaken = errors.New("another controller leads, or the run was started again")

// taken reports that another controller drives the run, or that the run has a newer incarnation.
func taken(err error) bool { return errors.Is(err, errTaken) || fence.Refused(err) }

// drive drives one run, with one learner after the other. Its own goroutine uses everything except
// progress, stop, and done.
type drive struct {
	settings
	cfg      Config
	deps     Deps
	log      *slog.Logger
	spec     *learnerv1.StartRunRequest
	events   *reporter
	progress *progress
	retries  retries
	room     *room
	fleet    *fleet
	delivery *delivery
	reserved *reserved // nil without reserved workers
	vitals   *vitals
	gates    *gates
	record   *record
	cuts     cuts // used by the requests of clients too

	drain     chan struct{} // closed: stop between two steps
	drainOnce sync.Once
	halted    context.Context // ends: stop now
	halt      context.CancelFunc
	done      chan struct{} // closed when run has returned
}

// newDrive makes a drive that continues from a stored one.
func newDrive(cfg Config, deps Deps, from *Drive) *drive {
	set, log := newSettings(from.Spec, deps.Epoch), deps.Log.With("run", from.Spec.GetRunId())
	events := &reporter{settings: set, bus: deps.Events, now: deps.Now, log: log, samples: cfg.Samples}
	progress := newProgress(events, &learnerv1.Progress{
		RunId: set.runID, Phase: from.Phase, Step: from.Step, TotalSteps: set.steps, Weights: from.Weights,
	})
	fleet := newFleet(set, deps.Dial, cfg.Retry, &lagging{reporter: events, progress: progress})
	delivery := &delivery{settings: set, fleet: fleet, progress: progress, events: events, now: deps.Now, newest: from.Weights, lineage: from.Weights.GetLineage()}
	drain := make(chan struct{})
	room := &room{disk: deps.Disk(set.directory), progress: progress, pause: cfg.DiskPause, draining: drain}
	retries := retries{first: cfg.Retry, progress: progress, room: room}
	vitals := newVitals(set, from.Health, events, deps.Snapshots, retries, log)
	watched := newGateMonitor(set, from.Gates, log)
	limit := drainLimit{draining: drain, grace: cfg.DrainGrace}
	reserved := newReserved(set, cfg, deps, progress, events, from.Evaluation, limit, log)
	record := &record{
		store: deps.Store, spec: from.Spec, fence: set.fence, progress: progress, delivery: delivery, vitals: vitals, gates: watched, reserved: reserved, log: log,
	}
	halted, halt := context.WithCancel(context.Background())
	return &drive{
		settings: set, cfg: cfg, deps: deps, log: log, spec: from.Spec, events: events, progress: progress,
		retries: retries, room: room, fleet: fleet, delivery: delivery, reserved: reserved, vitals: vitals,
		gates: &gates{settings: set, monitor: watched, record: record, events: events}, record: record,
		drain: drain, halted: halted, halt: halt, done: make(chan struct{}),
	}
}

// run drives until the last step, a failure, or a stop. If life ends, the drive stays active and
// continues after a restart.
func (d *drive) run(life context.Context) {
	defer close(d.done)
	work, cancel := context.WithCancel(life)
	defer cancel()
	defer context.AfterFunc(d.halted, cancel)()

	watch, unwatch := context.WithCancel(life)
	var wg sync.WaitGroup
	defer func() { unwatch(); wg.Wait() }()
	launched := worker.Launched{
		Registry: d.deps.Registry, Scheduler: d.deps.Scheduler, Retry: d.cfg.Retry, Run: d.runID, Incarnation: d.incarnation,
	}
	workers := launched.Watch(watch, worker.Inference.Service())
	if d.reserved != nil {
		sampling, evaluating := make(chan []discovery.Instance), make(chan []discovery.Instance)
		all := workers
		workers = sampling
		d.reserved.life = work
		wg.Go(func() { split(watch, all, sampling, evaluating) })
		wg.Go(func() { d.reserved.fleet.serve(watch, evaluating) })
	}
	wg.Go(func() { d.fleet.serve(watch, workers) })

	err := d.drive(work, &learners{runID: d.runID, updates: launched.Watch(watch, worker.Learner.Service())})
	if err == nil || gated(err) || leaves(err) {
		failed := d.reserved.join(work)
		if failed == nil {
			failed = d.gates.observeReserved(work, d.reserved)
		}
		if failed != nil {
			err = failed
		}
	}
	d.reserved.stop()
	unwatch()
	wg.Wait() // before the end, so that no event follows it
	if life.Err() != nil {
		d.record.save(context.WithoutCancel(life), true)
		return
	}
	d.end(life, err, work.Err() != nil)
}

// request makes the drive end, with drain between two steps.
func (d *drive) request(drain bool) {
	d.drainOnce.Do(func() { close(d.drain) })
	if !drain {
		d.halt()
	}
}

// over reports whether the drive makes no further step.
func (d *drive) over() bool { return ended(d.progress.phase()) || closed(d.done) }

// wait returns when the drive has ended.
func (d *drive) wait(ctx context.Context) error {
	select {
	case <-d.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// drive runs one session after the other, until one ends with something else than a lost learner.
func (d *drive) drive(ctx context.Context, learners *learners) error {
	for {
		if d.record.save(ctx, true) { // before a learner is called
			return errTaken
		}
		err := d.session(ctx, learners)
		if !errors.Is(err, errLost) || ctx.Err() != nil {
			return err
		}
		d.log.WarnContext(ctx, "the learner was lost; another one loads its state", "error", err)
		d.progress.enter(recovering)
	}
}

// session works with one learner until the run ends or the learner is lost.
func (d *drive) session(ctx context.Context, learners *learners) error {
	d.progress.waitFor(service("scheduler", "a learner worker (scheduler starts it)"))
	l, err := learners.connect(ctx, d.deps.Dial, newBackoff(d.cfg.Retry))
	if err != nil {
		return err
	}
	defer func() { _ = l.conn.Close() }()
	d.fleet.setLearner(l)
	defer d.fleet.setLearner(nil)
	d.reserved.setLearner(l)
	defer d.reserved.setLearner(nil)
	guarded, end := learners.guard(ctx, l)
	defer end()
	s := d.newSession(l)
	err = s.work(guarded)
	s.snapshotter.close(guarded)
	if cause := context.Cause(guarded); err != nil && errors.Is(cause, errLost) {
		return cause // the other errors are consequences
	}
	return err
}

// end records how the drive ended and reports it to the scheduler.
func (d *drive) end(ctx context.Context, err error, cancelled bool) {
	if taken(err) || err != nil && d.record.save(ctx, true) {
		d.log.InfoContext(ctx, "the drive ends: "+errTaken.Error(), "error", err)
		return
	}
	phase, report := d.outcome(err, cancelled)
	if err != nil && report != nil {
		d.log.InfoContext(ctx, "the run stops", "state", report.GetState(), "reason", report.GetReason(), "error", err)
	}
	message := ""
	if phase == failed {
		message = report.GetMessage()
	}
	d.progress.end(phase, message)
	d.events.flush(ctx)
	lost := d.record.save(ctx, report != nil) // active: a restarted controller repeats a report that is not delivered
	if lost || report == nil {
		return
	}
	crashpoint.Here("controller/finished") // the end is stored, the scheduler does not know it
	if _, err := call(ctx, d.retries, "scheduler", d.deps.Scheduler.CompleteRun, report); err != nil {
		d.log.ErrorContext(ctx, "the scheduler refused the end of the run", "error", err)
		return
	}
	d.gates.monitor.End()
	crashpoint.Here("controller/reported") // the scheduler knows the end, a restart would report it again
	d.record.save(ctx, false)
}

// outcome returns the final phase of a drive and the report for the scheduler; nil for a requested
// stop.
func (d *drive) outcome(err error, cancelled bool) (learnerv1.Phase, *runv1.CompleteRunRequest) {
	report := &runv1.CompleteRunRequest{RunId: d.runID, Fence: d.fence, State: runv1.RunState_RUN_STATE_SUCCEEDED}
	switch {
	case err == nil:
		return finished, report
	case errors.Is(err, errDrained), cancelled:
		return stopped, nil
	}
	report.Reason, report.Message = rpcerr.Reason(err), rpcerr.Text(err)
	if report.GetReason() == refusal.StoppedByGate {
		return finished, report
	}
	if refusal.Is(report.GetReason()) && !d.stops(report.GetReason()) { // a person decides whether the run continues
		report.State = runv1.RunState_RUN_STATE_PAUSED
		return stopped, report
	}
	report.State = runv1.RunState_RUN_STATE_FAILED
	if report.GetReason() == "" {
		report.Reason = ReasonStep
	}
	return failed, report
}

// session is the collaborators of a drive that work with one learner.
type session struct {
	settings
	recovery    *recovery
	stepper     *stepper
	gates       *gates
	delivery    *delivery
	learner     *learner
	room        *room
	snapshotter *snapshotter
	draining    <-chan struct{}
}

func (d *drive) newSession(l *learner) *session {
	ledger := &ledger{settings: d.settings, buffer: d.deps.Buffer, leaseWait: d.cfg.LeaseWait, retries: d.retries}
	evaluator := &evaluator{
		settings: d.settings, learner: l, delivery: d.delivery, reserved: d.reserved, progress: d.progress, events: d.events, record: d.record, log: d.log, retry: d.cfg.Retry,
		limit: drainLimit{draining: d.drain, grace: d.cfg.DrainGrace},
	}
	snapshotter := &snapshotter{
		settings: d.settings, learner: l, service: d.deps.Snapshots, ledger: ledger, progress: d.progress, retries: d.retries, log: d.log,
		room: d.room, delivery: d.delivery, cuts: &d.cuts, gates: d.gates.monitor,
	}
	due := &dueWork{settings: d.settings, evaluator: evaluator, snapshotter: snapshotter, gates: d.gates, learner: l, ledger: ledger, delivery: d.delivery, room: d.room, progress: d.progress}
	return &session{
		settings: d.settings, snapshotter: snapshotter, draining: d.drain, gates: d.gates, delivery: d.delivery, learner: l, room: d.room,
		recovery: &recovery{
			settings: d.settings, learner: l, ledger: ledger, delivery: d.delivery, snapshotter: snapshotter, evaluator: evaluator,
			due: due, room: d.room, progress: d.progress, events: d.events, vitals: d.vitals, gates: d.gates, log: d.log,
		},
		stepper: &stepper{
			settings: d.settings, learner: l, ledger: ledger, delivery: d.delivery, due: due, record: d.record, room: d.room,
			progress: d.progress, events: d.events, vitals: d.vitals, gates: d.gates, now: d.deps.Now, draining: d.drain,
		},
	}
}

// work recovers the last committed step and makes the steps after it.
func (s *session) work(ctx context.Context) error {
	step, err := s.recovery.recover(ctx)
	if err != nil {
		return err
	}
	s.gates.repeat(step)
	for !s.last(step) {
		if f := s.gates.monitor.Halted(); f != nil {
			return s.halt(ctx, step, *f)
		}
		if closed(s.draining) {
			return s.leave(ctx, step)
		}
		if err := s.stepper.step(ctx, step+1); err != nil {
			if leaves(err) {
				return s.leave(ctx, step)
			}
			return err
		}
		step++
	}
	return nil
}

// leave takes a snapshot of the last step, so that a resumed run retrains nothing; none if the disk
// has no space for it.
func (s *session) leave(ctx context.Context, step uint64) error {
	if err := s.snapshotter.join(ctx); err != nil {
		return err
	}
	if step > 0 && (!s.snapshots(step) || s.snapshotter.owed) {
		if err := s.recovery.due.settle(ctx, step); err != nil {
			return err
		}
		restored, err := s.recovery.due.restore(ctx, step)
		if err != nil || restored { // a restored state has its snapshot already
			return cmp.Or(err, errDrained)
		}
		if err := s.snapshotter.take(ctx, step, periodic); err != nil {
			return err
		}
	}
	return errDrained
}

// halt ends the run because a gate fired: like after the last step, the workers have the weights of
// the step, and a snapshot has its state.
func (s *session) halt(ctx context.Context, step uint64, f gate.Fired) error {
	if step > 0 && !s.delivers(step) {
		weights, err := s.learner.publish(ctx, s.room)
		if err != nil {
			return err
		}
		weights.Lineage = s.delivery.lineage
		if err := s.delivery.deliver(ctx, weights); err != nil {
			return err
		}
	}
	if err := s.leave(ctx, step); !errors.Is(err, errDrained) {
		return err
	}
	return gateError(f)
}

// record is the drive in the store.
type record struct {
	store    Store
	spec     *learnerv1.StartRunRequest
	fence    *fencev1.Fence
	progress *progress
	delivery *delivery
	vitals   *vitals
	gates    *gate.Monitor
	reserved *reserved // nil without reserved workers
	log      *slog.Logger
}

// save writes the drive. An error is only logged, because the store is a hint for the next process.
// taken reports that another controller leads or that the run has a newer incarnation: this drive
// must not report anything any more.
func (r *record) save(ctx context.Context, active bool) (taken bool) {
	p, _ := r.progress.read()
	err := r.store.Save(ctx, &Drive{
		Spec: r.spec, Phase: p.GetPhase(), Step: p.GetStep(), Active: active, Weights: r.delivery.newest, Health: r.vitals.monitor.State(),
		Gates: r.gates.State(), Evaluation: r.reserved.state(),
	}, r.fence)
	taken = errors.Is(err, lease.ErrFenced) || fence.Refused(err)
	if err != nil && !taken {
		r.log.WarnContext(ctx, "the drive was not saved", "error", err)
	}
	return taken
}
