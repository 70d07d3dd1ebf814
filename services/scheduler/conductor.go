package scheduler

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/telemetry"
	"github.com/rollout-rl/rollout/libs/wait"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	"github.com/rollout-rl/rollout/services/scheduler/issue"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// scope is what the parts of one active run share.
type scope struct {
	Deps
	records *records
	board   *board
	retry   retry.Retrier
	ending  endings
	// The id and incarnation of the run.
	run         string
	incarnation uint32
}

// fence is what the calls to other services carry.
func (s *scope) fence() *fencev1.Fence { return s.Deps.fence(s.incarnation) }

// emit sends an event of the run.
func (s *scope) emit(e *eventv1.Event) { s.records.emit(s.board.record(), e) }

// conductor runs the parts of one active run: supervisors of workers, registry watchers, the link
// to the controller, the issuer.
//
//	open streams and ledger -> run the parts in parallel -> first ending -> stop the parts -> close and record the end
type conductor struct {
	*scope
	resumeOnStart bool
	inherited     bool           // the conductor began with workers of a scheduler that died
	adopts        bool           // the parts run with workers that ran before; used by conduct alone
	takesOver     bool           // the first time
	live          sync.WaitGroup // the conductor, and what outlives it
	supervision   *supervision
	trackers      *trackers
	control       *control
	poller        *poller
	closing       *closing
	done          chan struct{} // closed when conduct has returned
}

func newConductor(owner *conductors, run *Run, workers map[string]adopted) *conductor {
	board := newBoard(run, owner.deps.Now)
	s := &scope{
		Deps: owner.deps, records: owner.records, board: board, retry: retry.New(run.GetRunId(), board.blocked, owner.deps.Log),
		ending: make(endings, 1), run: run.GetRunId(), incarnation: run.GetIncarnation(),
	}
	done := make(chan struct{})
	supervision := newSupervision(s, owner.cfg.Worker, func() bool { return owner.count() == 1 })
	supervision.keep, supervision.adopted = owner.cfg.ResumeOnStart, workers
	board.update(func(v *view) { // so that their registrations are accepted at once
		for id, w := range workers {
			v.fleet.put(id, w.view())
		}
	})
	return &conductor{
		scope: s, resumeOnStart: owner.cfg.ResumeOnStart, inherited: len(workers) > 0, adopts: len(workers) > 0, takesOver: len(workers) > 0, supervision: supervision,
		trackers: newTrackers(s, supervision, owner.cfg.Worker.Limits, owner.base, done),
		control:  newControl(s), poller: newPoller(s), closing: &closing{s}, done: done,
	}
}

// conduct returns when the run has ended, or when ctx ends, which interrupts the run.
func (c *conductor) conduct(ctx context.Context) {
	defer c.poller.close()
	defer close(c.done)
	var run *Run
	err := c.retry.Until(ctx, retry.Awaited{Owner: names.SchedulerService, What: "the record of the run to be written (scheduler)"}, func(ctx context.Context) (err error) {
		run, err = c.records.writable(ctx, c.run)
		return err
	})
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil || !active(run.GetState()) { // another scheduler leads, or the run was cancelled before the start
		c.supervision.discard(err)
		return
	}
	c.live.Go(c.trackers.serve)
	parts, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		c.repeat(parts)
		c.supervision.discard(context.Cause(parts))
	}()
	stop := func() { cancel(nil); <-finished }
	leave := func() { cancel(launch.ErrRelease); <-finished } // the workers to the scheduler that leads
	var e *ending
	select {
	case e = <-c.ending:
		switch e {
		case handOver:
			stop()
			return
		case taken:
			leave()
			return
		}
	case <-ctx.Done():
		if c.resumeOnStart { // the record stays active, and the next scheduler continues the run
			stop()
			return
		}
		e = &ending{state: Interrupted, message: "the control plane stopped; `rollout run --resume " + c.run + "` continues it"}
		if refusal.Paused(c.board.record()) { // only a person ends that pause, and its reason is what they need
			e = &ending{state: Paused}
		}
	}
	end := context.WithoutCancel(ctx)
	if c.closing.lostLead(end) {
		leave()
		return
	}
	c.closing.before(end, e)
	stop()
	mark := c.closing.mark(end) // earlier than the last check of the leadership
	if !c.closing.lostLead(end) {
		end, cancel := recording(ctx)
		defer cancel()
		c.closing.after(end, e, mark)
	}
}

// left reports whether conduct has returned.
func (c *conductor) left() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// repeat runs the parts until ctx ends or the run does. It starts again if a service was
// unavailable, a disk was full, or the streams are missing: they contain nothing that cannot be
// published again.
func (c *conductor) repeat(ctx context.Context) {
	for {
		err := c.runParts(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		if fence.Refused(err) {
			c.Log.WarnContext(ctx, taken.message, telemetry.AttrRun, c.run, "error", err)
			c.ending.end(taken)
			return
		}
		if !restartable(err) {
			c.ending.end(failure(err))
			return
		}
		c.Log.WarnContext(ctx, "the parts of the run are restarted", telemetry.AttrRun, c.run, "error", err)
		workers := c.adopt(ctx, c.board.record())
		c.supervision.adopted, c.adopts, c.takesOver = workers, len(workers) > 0, false
		if retry.Sleep(ctx, time.Second) != nil {
			return
		}
	}
}

// lost reports whether an error says that another scheduler leads.
func lost(err error) bool { return errors.Is(err, lease.ErrFenced) || fence.Refused(err) }

// restartable reports whether the parts of a run are started again after an error.
func restartable(err error) bool {
	return rpcerr.Code(err) == codes.Unavailable || rpcerr.DiskFull(err) || errors.Is(err, bus.ErrNoStream)
}

// runParts opens the run, and runs its parts until ctx ends or one fails.
func (c *conductor) runParts(ctx context.Context) error {
	run := c.board.record()
	cursor, err := c.Store.Cursor(ctx, c.run)
	if err != nil {
		return err
	}
	window := issue.NewWindow(run.GetPlan(), cursor.First, cursor.FirstStep)
	data, err := trainData(run)
	if err != nil {
		return err
	}
	if err := c.retry.Until(ctx, retry.Awaited{Owner: names.SchedulerService, What: "the folder and the record of the run (scheduler)"}, func(ctx context.Context) error {
		if err := os.MkdirAll(filepath.Join(run.GetDirectory(), "workers"), 0o700); err != nil {
			return fmt.Errorf("make the folder of the run: %w", err)
		}
		if run.GetState() == Pending {
			run, err = c.records.transition(ctx, c.run, Starting, nil)
		}
		return err
	}); err != nil {
		return err
	}
	config := window.LedgerConfig(run.GetPlan(), data.Rows)
	if window, err = c.begin(ctx, run, window, config); err != nil {
		return err
	}
	if err := c.open(ctx, config); err != nil {
		return err
	}
	crashpoint.Here("scheduler/opened") // the ledger is open, no worker is started
	c.board.SetPosition(cursor.Position, window.First, data.Rows)

	parts := []func(context.Context) error{
		c.control.serve, c.control.drain, (&backpressure{c.scope}).serve,
		func(ctx context.Context) error { return c.issue(ctx, run, window, data, cursor.Position) },
	}
	if algorithm.External(run.GetPlan().GetConfig()) {
		parts = append(parts, c.supervision.watchGateway)
	}
	return runUntilFirst(ctx, append(parts, c.supervision.parts(run, supervised(run))...))
}

// runUntilFirst runs functions in parallel until one fails or ctx ends, and waits until all have
// returned. If the error is not about the workers, they may continue: the cause is
// launch.ErrRelease.
func runUntilFirst(ctx context.Context, parts []func(context.Context) error) error {
	running, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	failed := make(chan error, 1)
	for _, part := range parts {
		wg.Go(func() {
			if err := part(running); err != nil && running.Err() == nil {
				select {
				case failed <- err:
				default:
				}
			}
		})
	}
	var err error
	select {
	case err = <-failed:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if restartable(err) || lost(err) {
		cancel(launch.ErrRelease)
	}
	cancel(nil)
	wg.Wait()
	return err
}

func (c *conductor) issue(ctx context.Context, run *Run, window issue.Window, data issue.Data, position uint64) error {
	issuer, err := issue.Open(issue.Deps{
		Buffer: c.Buffer, Stream: c.Bus, Cursor: c.Store, Board: c.board, Retry: c.retry, Emit: c.emit, Fence: c.fence(), Log: c.Log, Continues: c.adopts,
	}, run, window, data, position)
	if err != nil {
		return err
	}
	defer issuer.Close()
	return issuer.Run(ctx)
}

// open creates the streams and opens the ledger. Without adopted workers, the issuer publishes
// again what those of older incarnations had pulled, so the work stream starts empty. With them,
// streams that are missing are created by the first sweep of the issuer.
func (c *conductor) open(ctx context.Context, config *bufferv1.LedgerConfig) error {
	if err := c.retry.Until(ctx, retry.Awaited{Owner: wait.NATS, What: "the streams of the run (NATS)"}, func(ctx context.Context) error {
		if c.takesOver {
			return nil
		}
		if err := c.Bus.EnsureRun(ctx, c.run); err != nil || c.adopts {
			return err
		}
		mark, err := c.Bus.WorkMark(ctx, c.run)
		if err != nil {
			return err
		}
		if _, err := c.records.writable(ctx, c.run); err != nil { // another scheduler leads: its work must stay
			return err
		}
		return c.Bus.PurgeWork(ctx, c.run, mark)
	}); err != nil {
		return err
	}
	crashpoint.Here("scheduler/streams") // streams exist and work is purged, the ledger is not open
	return c.retry.Until(ctx, retry.Awaited{Owner: names.BufferService, What: "the ledger of the run (buffer)"}, func(ctx context.Context) error {
		resp, err := c.Buffer.OpenLedger(ctx, &bufferv1.OpenLedgerRequest{RunId: c.run, Config: config, Fence: c.fence()})
		if err == nil {
			c.board.SetLedger(resp.GetState())
		}
		return err
	})
}

// conductors owns the conductors of the active runs. Safe for concurrent use.
type conductors struct {
	cfg     Config
	deps    Deps
	records *records

	base context.Context // ends when the scheduler stops
	stop context.CancelCauseFunc
	wg   sync.WaitGroup

	mu       sync.Mutex
	stopping bool
	byRun    map[string]*conductor
	leaving  map[string]chan struct{} // closed when nothing of the run is active any more
}

func newConductors(cfg Config, deps Deps, records *records) *conductors {
	c := &conductors{cfg: cfg, deps: deps, records: records, byRun: map[string]*conductor{}, leaving: map[string]chan struct{}{}}
	c.base, c.stop = context.WithCancelCause(context.Background())
	return c
}

// start begins to conduct a run, with workers that already run.
func (c *conductors) start(run *Run, workers map[string]adopted) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopping {
		return ErrStopping
	}
	conductor := newConductor(c, run, workers)
	c.byRun[run.GetRunId()] = conductor
	detach := c.records.attach(run.GetRunId(), conductor.board)
	before, gone := c.leaving[conductor.run], make(chan struct{})
	c.leaving[conductor.run] = gone
	conductor.live.Go(func() {
		conductor.conduct(c.base)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.byRun[conductor.run] == conductor {
			delete(c.byRun, conductor.run)
		}
		detach()
	})
	c.wg.Go(func() {
		conductor.live.Wait()
		if before != nil { // of the incarnation before
			<-before
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		close(gone)
		if c.leaving[conductor.run] == gone {
			delete(c.leaving, conductor.run)
		}
	})
	return nil
}

// gone waits until nothing of a run is active: its conductor, and the process that writes to its
// trackers.
func (c *conductors) gone(ctx context.Context, runID string) error {
	c.mu.Lock()
	leaving := c.leaving[runID]
	c.mu.Unlock()
	if leaving == nil {
		return nil
	}
	select {
	case <-leaving:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// get returns the conductor of a run; nil if the run is not active here.
func (c *conductors) get(runID string) *conductor {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byRun[runID]
}

// named is the id of an active run with a name; "" if there is none.
func (c *conductors) named(name string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, conductor := range c.byRun {
		if conductor.board.record().GetName() == name {
			return id
		}
	}
	return ""
}

// count is the number of active runs.
func (c *conductors) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.byRun)
}

// shutdown interrupts every run and waits for the conductors. With the cause launch.ErrRelease or
// launch.ErrHandOver it leaves the workers running.
func (c *conductors) shutdown(cause error) {
	c.mu.Lock()
	c.stopping = true
	c.mu.Unlock()
	c.stop(cause)
	c.wg.Wait()
}
