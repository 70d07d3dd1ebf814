package scheduler

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// ending is how a run ends. It is an error so that parts can return it.
type ending struct {
	state           State
	reason, message string
}

// handOver is no end: the conductor leaves the run as it is recorded, for the next one to go on with.
var handOver = &ending{reason: "HAND_OVER", message: "the next incarnation goes on"}

func (e *ending) Error() string { return e.reason + ": " + e.message }

// failure turns what stopped a part into the run's ending.
func failure(err error) *ending {
	var e *ending
	if errors.As(err, &e) {
		return e
	}
	var loop *launch.CrashLoop
	if errors.As(err, &loop) {
		return &ending{state: Failed, reason: "WORKER_CRASH_LOOP", message: loop.Error()}
	}
	reason := rpcerr.Reason(err)
	if reason == "" {
		reason = rpcerr.ReasonInternal
	}
	return &ending{state: Failed, reason: reason, message: rpcerr.Text(err)}
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
		c.askProgress(ctx)
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

// askProgress sees how far the controller is: its end is heard before the last of what it streams.
func (c *conductor) askProgress(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if resp, err := c.svc.Controller.GetProgress(ctx, &learnerv1.GetProgressRequest{RunId: c.id}); err == nil {
		c.seeProgress(resp.GetProgress())
	}
}

// after closes what the run used and records its end. The streams of a run that has succeeded go last: by then its record says that
// nobody will go on with it.
func (c *conductor) after(ctx context.Context, e *ending, mark uint64) {
	s := c.svc
	c.askProgress(ctx)
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
	c.told(ctx, e)
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

// told waits until storage has the events of the run: who hears of its end may read its last step and evaluation at once. The
// controller's are on the bus when it reports. A storage service that is away keeps no run from ending, nor does it a process from
// leaving, whose runs are Interrupted or Paused.
func (c *conductor) told(ctx context.Context, e *ending) {
	if e.state == Interrupted || e.state == Paused {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := errors.Join(c.svc.Events.Flush(ctx), c.svc.Bus.EventsStored(ctx)); err != nil {
		c.svc.Log.WarnContext(ctx, "the last events of the run may be stored after its end", "run", c.id, "error", err)
	}
}
