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
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/reward"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// conductor is the goroutines of one active run.
//
//	open (streams, ledger) -> parts in parallel: supervisors, registry, controller, issuer -> ending -> parts stop -> closed
//
// Whoever knows first why the run ends calls end; the first word holds.
type conductor struct {
	svc         *service
	id          string
	incarnation uint32 // that it conducts; whoever knows of a newer one refuses what it says
	window      Window
	rows        uint64

	endings  chan *ending // holds the first
	draining chan struct{}
	drainOne sync.Once
	done     chan struct{}

	records sync.Mutex // held from the write of the record until the view shows it

	mu      sync.Mutex
	view    view
	changed chan struct{} // closed and replaced on each change
	kept    time.Time     // when progress was written to the store last

	polls  sync.Mutex
	polled time.Time // when the workers were asked last
	lines  lines
}

func newConductor(s *service, run *Run) *conductor {
	c := &conductor{
		svc: s, id: run.GetRunId(), incarnation: run.GetIncarnation(), endings: make(chan *ending, 1), draining: make(chan struct{}), done: make(chan struct{}),
		changed: make(chan struct{}),
	}
	c.view = newView(run)
	return c
}

// end says how the run ends, unless somebody said it before.
func (c *conductor) end(e *ending) {
	select {
	case c.endings <- e:
	default:
	}
}

// drain lets the controller finish the step in hand; the run then ends as cancelled.
func (c *conductor) drain() { c.drainOne.Do(func() { close(c.draining) }) }

// run conducts until the run has ended or ctx ends, which interrupts it.
func (c *conductor) run(ctx context.Context) {
	defer close(c.done)
	defer c.lines.keep(nil)
	if run, err := c.svc.update(ctx, c.id, func(*Run) error { return nil }); err != nil || !active(run.GetState()) {
		return // cancelled before it began
	}
	c.feedSinks()
	parts, cancel := context.WithCancel(ctx)
	defer cancel()
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		c.conductAgain(parts)
	}()
	var e *ending
	select {
	case e = <-c.endings:
		if e == handOver {
			cancel()
			<-finished
			return
		}
	case <-ctx.Done():
		if c.svc.cfg.ResumeOnStart { // by the record it is active, and the next scheduler goes on with it
			cancel()
			<-finished
			return
		}
		e = &ending{state: Interrupted, message: "the control plane stopped; `rollout run --resume " + c.id + "` goes on"}
		if refusal.Paused(c.record()) { // nobody but a person ends that, and its reason is what they need
			e = &ending{state: Paused}
		}
	}
	closing := context.WithoutCancel(ctx)
	if c.taken(closing) {
		cancel()
		<-finished
		return
	}
	c.before(closing, e)
	cancel()
	<-finished
	mark := c.mark(closing) // before the last look at the lease
	if !c.taken(closing) {
		c.after(closing, e, mark)
	}
}

// mark is the end of the work that this conductor has published; 0 where it can't be known now.
func (c *conductor) mark(ctx context.Context) uint64 {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	mark, err := c.svc.Bus.WorkMark(ctx, c.id)
	if err != nil {
		c.svc.Log.DebugContext(ctx, "the work of the run is not dropped", "run", c.id, "error", err)
	}
	return mark
}

// conductAgain conducts until ctx ends or the run does, from the beginning where what it needs was away for a moment, or its streams
// are gone: they hold nothing that is not made again.
func (c *conductor) conductAgain(ctx context.Context) {
	for {
		err := c.conduct(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		if rpcerr.Code(err) != codes.Unavailable && !errors.Is(err, bus.ErrNoStream) {
			c.end(failure(err))
			return
		}
		c.svc.Log.WarnContext(ctx, "the run begins again", "run", c.id, "error", err)
		if pause(ctx, time.Second) != nil {
			return
		}
	}
}

// taken reports whether another scheduler leads, or may: then the run is its own, and what the run uses must not be closed under it.
// This process's workers end all the same. Another may lead right after this look, and this process stand still meanwhile: so what it
// says of the run afterwards bears its incarnation, and it drops the work before its mark alone.
func (c *conductor) taken(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_, err := c.svc.update(ctx, c.id, func(*Run) error { return nil })
	if errors.Is(err, lease.ErrFenced) || errors.Is(err, sqldb.ErrUnavailable) {
		c.svc.Log.WarnContext(ctx, "the run is left to the scheduler that leads", "run", c.id, "error", err)
		return true
	}
	return false
}

// before readies the others for the end while the workers still run.
func (c *conductor) before(ctx context.Context, e *ending) {
	if e.state == Succeeded {
		if c.state() == Starting { // a short run: the controller was done before its progress was heard
			_, _ = c.svc.transition(ctx, c.id, Running, nil)
		}
		progress := c.progress()
		all := func(r *Run) error { advance(r, progress); return nil } // its record is a little behind
		if _, err := c.svc.transition(ctx, c.id, Draining, all); err != nil {
			c.svc.Log.WarnContext(ctx, "run does not drain", "run", c.id, "error", err)
		}
		return
	}
	stopping, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := c.svc.Controller.StopRun(stopping, &learnerv1.StopRunRequest{RunId: c.id, Incarnation: c.incarnation}); err != nil {
		c.svc.Log.DebugContext(ctx, "controller was not told of the end", "run", c.id, "error", err)
	}
}

// after closes what the run used and records its end. The streams of a run that has succeeded go last: by then its record says that
// nobody will go on with it.
func (c *conductor) after(ctx context.Context, e *ending, mark uint64) {
	s := c.svc
	asking, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if resp, err := s.Controller.GetProgress(asking, &learnerv1.GetProgressRequest{RunId: c.id}); err == nil {
		c.seeProgress(resp.GetProgress())
	}
	closing, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	_, err := s.Buffer.CloseLedger(closing, &bufferv1.CloseLedgerRequest{RunId: c.id, Incarnation: c.incarnation})
	crashpoint.Here("scheduler/closed") // the ledger is closed, the streams are there
	errs := []error{err, s.Store.KeepQueues(ctx, c.id, c.queues())}
	if e.state != Succeeded && mark > 0 {
		errs = append(errs, s.Bus.PurgeWork(closing, c.id, mark))
	}
	if err := errors.Join(errs...); err != nil {
		s.Log.WarnContext(ctx, "not everything of the run could be closed", "run", c.id, "error", err)
	}
	crashpoint.Here("scheduler/ended") // what was to be closed is, the end is not recorded
	progress := c.progress()
	if e.state == Paused { // the record says so, and why
		_, err = s.update(ctx, c.id, func(r *Run) error { advance(r, progress); return nil })
		if err != nil {
			s.Log.WarnContext(ctx, "the record of a paused run may lack its last steps", "run", c.id, "error", err)
		}
		return
	}
	_, err = s.transition(ctx, c.id, e.state, func(r *Run) error {
		r.Reason, r.Message = e.reason, e.message
		if e.state != Interrupted {
			r.EndTime = timestamppb.New(s.Now().UTC())
		}
		advance(r, progress)
		return nil
	})
	if err != nil {
		s.Log.ErrorContext(ctx, "the end of the run could not be recorded", "run", c.id, "state", stateName(e.state), "error", err)
		return
	}
	if e.state != Succeeded {
		return
	}
	removing, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := s.Bus.DeleteRun(removing, c.id); err != nil {
		s.Log.WarnContext(ctx, "the streams of the run stay until the scheduler starts again", "run", c.id, "error", err)
	}
}

// conduct opens the run and runs its parts until ctx ends or one fails.
func (c *conductor) conduct(ctx context.Context) error {
	run := c.record()
	cursor, err := c.svc.Store.Cursor(ctx, c.id)
	if err != nil {
		return err
	}
	c.window = windowOf(run.GetPlan(), cursor.First, cursor.FirstStep)
	data, err := trainData(run)
	if err != nil {
		return err
	}
	c.rows = data.rows
	if err := os.MkdirAll(filepath.Join(run.GetDirectory(), "workers"), 0o700); err != nil {
		return fmt.Errorf("make the folder of the run: %w", err)
	}
	if run.GetState() == Pending {
		if run, err = c.svc.transition(ctx, c.id, Starting, nil); err != nil {
			return err
		}
	}
	if err := c.open(ctx, run); err != nil {
		return err
	}
	crashpoint.Here("scheduler/opened") // the ledger is open, no worker is started
	parts, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	failed := make(chan error, 1)
	start := func(part func(context.Context) error) {
		wg.Go(func() {
			if err := part(parts); err != nil && parts.Err() == nil {
				select {
				case failed <- err:
				default:
				}
			}
		})
	}
	kinds := []string{"inference", "learner"}
	if len(reward.Models(run.GetPlan().GetConfig())) > 0 {
		kinds = append(kinds, "reward")
	}
	for _, kind := range kinds {
		start(func(ctx context.Context) error { return c.watchRegistry(ctx, kind) })
	}
	for _, sup := range c.supervisors(run) {
		start(sup.Run)
	}
	start(c.control)
	start(c.pressure)
	start(c.drained)
	issuer := newIssuer(c, run, data, cursor.Position)
	start(issuer.run)

	select {
	case err = <-failed:
	case <-ctx.Done():
		err = ctx.Err()
	}
	cancel()
	wg.Wait()
	return err
}

// open makes the streams and the ledger. Workers of an older incarnation are gone: what they had pulled is published again by
// the issuer, so the work stream starts empty.
func (c *conductor) open(ctx context.Context, run *Run) error {
	if err := c.insist(ctx, "the streams of the run (NATS)", func(ctx context.Context) error {
		if err := c.svc.Bus.EnsureRun(ctx, c.id); err != nil {
			return err
		}
		mark, err := c.svc.Bus.WorkMark(ctx, c.id)
		if err != nil {
			return err
		}
		if _, err := c.svc.update(ctx, c.id, func(*Run) error { return nil }); err != nil { // who does not lead any more is refused here
			return err
		}
		return c.svc.Bus.PurgeWork(ctx, c.id, mark)
	}); err != nil {
		return err
	}
	crashpoint.Here("scheduler/streams") // streams are there and work is purged, the ledger is not open
	return c.insist(ctx, "the ledger of the run (buffer)", func(ctx context.Context) error {
		resp, err := c.svc.Buffer.OpenLedger(ctx, &bufferv1.OpenLedgerRequest{
			RunId: c.id, Config: c.window.ledgerConfig(run.GetPlan(), c.rows), Incarnation: c.incarnation,
		})
		if err == nil {
			c.seeLedger(resp.GetState())
		}
		return err
	})
}

// control starts the controller and listens to it; it begins again when the controller's process was replaced.
// listen follows the progress until the controller ends the stream (nil) or it breaks.
// drained waits for a request to drain and carries it out.
// insist repeats a call while it fails in a way that may pass, and shows what is waited for.
// noticeSlow shows what is waited for when a call has not returned after two seconds; the returned function ends that.
// follow repeats a call that reads a stream, however the stream ends, until ctx ends or the call fails for good.
// keepProgress writes the progress into the run's record, at once when the state changes, else once a second with the queues: what
// is seen of the run if this process dies.
// advance takes what the progress says of steps and weights into the record; it never goes back.
// record is the run's record as it was seen last.
func (c *conductor) record() *Run {
	c.mu.Lock()
	defer c.mu.Unlock()
	return proto.CloneOf(c.view.run)
}

func (c *conductor) queues() *runv1.Queues {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view.queues()
}

func (c *conductor) progress() *learnerv1.Progress {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view.progress
}

// pause waits, at most until ctx ends.
