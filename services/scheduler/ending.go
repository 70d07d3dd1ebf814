package scheduler

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/telemetry"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// ending is how a run ends. It is an error so that parts can return it.
type ending struct {
	state           State
	reason, message string
}

func (e *ending) Error() string { return e.reason + ": " + e.message }

// handOver ends a conductor and leaves the record as it is, for the next incarnation.
var handOver = &ending{reason: "HAND_OVER", message: "the next incarnation continues the run"}

// taken ends a conductor whose run another scheduler has taken over; the record belongs to that
// one.
var taken = &ending{reason: "TAKEN", message: "the run is left to the scheduler that leads"}

// endings holds the first ending of a run.
type endings chan *ending

// end ends the run, unless it has an ending already.
func (e endings) end(how *ending) {
	select {
	case e <- how:
	default:
	}
}

// failure converts the error of a part into an ending.
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

// closing ends a run in the other services, the streams, and the store.
type closing struct{ *scope }

// mark is the end of the work that this conductor has published; 0 if it cannot be read.
func (c *closing) mark(ctx context.Context) uint64 {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	mark, err := c.Bus.WorkMark(ctx, c.run)
	if err != nil {
		c.Log.DebugContext(ctx, "the work of the run is not purged", telemetry.AttrRun, c.run, "error", err)
	}
	return mark
}

// lostLead reports whether another scheduler leads, or may lead. The run then belongs to it, and
// its ledger and streams must stay open. The other one may take the lead right after this check,
// and this process may be suspended in between: its calls therefore carry a fence, and it purges
// only work before its mark.
func (c *closing) lostLead(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_, err := c.records.writable(ctx, c.run)
	if errors.Is(err, lease.ErrFenced) || errors.Is(err, sqldb.ErrUnavailable) {
		c.Log.WarnContext(ctx, taken.message, telemetry.AttrRun, c.run, "error", err)
		return true
	}
	return false
}

// before prepares the end while the workers still run.
func (c *closing) before(ctx context.Context, e *ending) {
	if e.state == Succeeded {
		if c.board.State() == Starting { // a short run: the controller finished before its progress arrived
			_, _ = c.records.transition(ctx, c.run, Running, nil)
		}
		c.askProgress(ctx)
		progress := c.board.progress()
		all := func(r *Run) error { advance(r, progress); return nil } // the record lacks the last steps
		if _, err := c.records.transition(ctx, c.run, Draining, all); err != nil {
			c.Log.WarnContext(ctx, "the run does not drain", telemetry.AttrRun, c.run, "error", err)
		}
		return
	}
	stopping, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := c.Controller.StopRun(stopping, &learnerv1.StopRunRequest{RunId: c.run, Fence: c.fence()}); err != nil {
		c.Log.DebugContext(ctx, "the controller could not be stopped", telemetry.AttrRun, c.run, "error", err)
	}
}

// askProgress reads the progress of the controller. Its end may arrive before the last progress
// that it streams.
func (c *closing) askProgress(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if resp, err := c.Controller.GetProgress(ctx, &learnerv1.GetProgressRequest{RunId: c.run}); err == nil {
		c.board.setProgress(resp.GetProgress())
	}
}

// recordGrace is how long the end of a run may still be recorded after the scheduler began to stop.
const recordGrace = 2 * time.Second

// recording is the context in which an end is recorded: it ends a moment after ctx.
func recording(ctx context.Context) (context.Context, context.CancelFunc) {
	out, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(recordGrace, cancel) })
	return out, func() { stop(); cancel() }
}

// whenSpace calls write until the disk is not full or ctx ends. The run shows what it waits for.
func (c *closing) whenSpace(ctx context.Context, what retry.Awaited, write func() error) (err error) {
	_ = c.retry.Until(ctx, what, func(context.Context) error {
		if err = write(); rpcerr.DiskFull(err) {
			return err
		}
		return nil
	})
	return err
}

// after closes what the run used and records its end. While the disk is full, it waits until ctx
// ends. The streams of a run that has succeeded are deleted last: its record then says that the run
// is not continued.
func (c *closing) after(ctx context.Context, e *ending, mark uint64) {
	c.askProgress(ctx)
	closeLedger := func() error {
		closing, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		_, err := c.Buffer.CloseLedger(closing, &bufferv1.CloseLedgerRequest{RunId: c.run, Fence: c.fence()})
		return errors.Join(err, c.Store.KeepQueues(ctx, c.run, c.board.queues()))
	}
	err := c.whenSpace(ctx, retry.Awaited{Owner: names.BufferService, What: "the ledger of the run to be closed (buffer)"}, closeLedger)
	if fence.Refused(err) {
		c.Log.WarnContext(ctx, taken.message, telemetry.AttrRun, c.run, "error", err)
		return
	}
	errs := []error{err}
	crashpoint.Here("scheduler/closed") // the ledger is closed, the streams exist
	closing, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if e.state != Succeeded && mark > 0 {
		errs = append(errs, c.Bus.PurgeWork(closing, c.run, mark))
	}
	if err := errors.Join(errs...); err != nil {
		c.Log.WarnContext(ctx, "the run could not be closed completely", telemetry.AttrRun, c.run, "error", err)
	}
	c.flushEvents(ctx, e)
	crashpoint.Here("scheduler/ended") // everything is closed, the end is not recorded
	progress := c.board.progress()
	if e.state == Paused { // the record has the state and the reason
		_, err := c.records.update(ctx, c.run, func(r *Run) error { advance(r, progress); return nil })
		if err != nil {
			c.Log.WarnContext(ctx, "the record of a paused run may lack its last steps", telemetry.AttrRun, c.run, "error", err)
		}
		return
	}
	if err := c.whenSpace(ctx, retry.Awaited{Owner: names.SchedulerService, What: "the end of the run to be recorded (scheduler)"}, func() error {
		_, err := c.records.transition(ctx, c.run, e.state, func(r *Run) error {
			r.Reason, r.Message = e.reason, e.message
			if e.state != Interrupted {
				r.EndTime = timestamppb.New(c.Now().UTC())
			}
			advance(r, progress)
			return nil
		})
		return err
	}); err != nil {
		c.Log.ErrorContext(ctx, "the end of the run could not be recorded", telemetry.AttrRun, c.run, "state", stateName(e.state), "error", err)
		return
	}
	if e.state != Succeeded {
		return
	}
	removing, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := c.Bus.DeleteRun(removing, c.run); err != nil {
		c.Log.WarnContext(ctx, "the streams of the run stay until the scheduler starts again", telemetry.AttrRun, c.run, "error", err)
	}
}

// flushEvents waits until storage has the events of the run, so that a client that sees the end can
// read the last step and evaluation. The events of the controller are on the bus when it reports.
// An unavailable storage service does not keep a run from ending. Runs that are interrupted or
// paused because this process exits do not wait.
func (c *closing) flushEvents(ctx context.Context, e *ending) {
	if e.state == Interrupted || e.state == Paused {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := errors.Join(c.Events.Flush(ctx), c.Bus.EventsStored(ctx)); err != nil {
		c.Log.WarnContext(ctx, "the last events of the run may be stored after its end", telemetry.AttrRun, c.run, "error", err)
	}
}
