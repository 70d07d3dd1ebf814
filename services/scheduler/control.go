package scheduler

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// keepEvery is the interval at which progress is written to the store.
const keepEvery = time.Second

// control is the link of a run to the learner-controller.
type control struct {
	*scope
	draining chan struct{}
	request  func()    // closes draining
	kept     time.Time // when progress was last written; used by serve alone
}

func newControl(s *scope) *control {
	draining := make(chan struct{})
	return &control{scope: s, draining: draining, request: sync.OnceFunc(func() { close(draining) })}
}

// requestDrain makes drain let the controller finish its step.
func (c *control) requestDrain() { c.request() }

// serve starts the run in the controller and follows its progress. It starts again when the process
// of the controller was replaced.
func (c *control) serve(ctx context.Context) error {
	run := c.board.record()
	if refusal.Paused(run) { // by an earlier incarnation, and not resumed by request: no step is tried
		<-ctx.Done()
		return nil
	}
	for {
		if err := c.retry.Until(ctx, retry.Awaited{Owner: names.ControllerService, What: "the controller to take the run (learner-controller)"}, func(ctx context.Context) error {
			_, err := c.Controller.StartRun(ctx, &learnerv1.StartRunRequest{
				RunId: c.run, Plan: run.GetPlan(), Fence: c.fence(), RunDirectory: run.GetDirectory(),
				FromSnapshot: run.GetFromSnapshot(),
			})
			return err
		}); err != nil {
			return err
		}
		err := c.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil { // the controller has ended the run, and reports it through CompleteRun or StopRun
			<-ctx.Done()
			return nil
		}
		c.board.blocked(controllerAnswers, err)
		if err := retry.Sleep(ctx, 200*time.Millisecond); err != nil {
			return nil
		}
	}
}

// controllerAnswers is the wait for the progress of the controller.
var controllerAnswers = retry.Awaited{Owner: names.ControllerService, What: "the controller to answer again (learner-controller)"}

// follow reads progress until the controller ends the stream (nil) or the stream breaks.
func (c *control) follow(ctx context.Context) error {
	stream, err := c.Controller.WatchProgress(ctx, &learnerv1.WatchProgressRequest{RunId: c.run})
	if err != nil {
		return err
	}
	for {
		resp, err := stream.Recv()
		if err != nil {
			return retry.EndOfStream(err)
		}
		c.board.WaitFor(controllerAnswers, "")
		c.board.setProgress(resp.GetProgress())
		if err := c.keep(ctx); err != nil {
			return err
		}
	}
}

// keep writes the progress into the record: at once when the state changes, otherwise every
// keepEvery and with the queues. This is what others see of the run if this process dies.
func (c *control) keep(ctx context.Context) error {
	progress := c.board.progress()
	begun := progress.GetPhase() > learnerv1.Phase_PHASE_PREPARING && progress.GetPhase() <= learnerv1.Phase_PHASE_SNAPSHOTTING
	write := func(r *Run) error {
		advance(r, progress)
		return nil
	}
	if begun && c.board.State() == Starting {
		_, err := c.records.transition(ctx, c.run, Running, write)
		if errors.Is(err, ErrTransition) { // paused or ended in the meantime
			return nil
		}
		return c.written(err)
	}
	now := c.Now()
	if now.Sub(c.kept) < keepEvery {
		return nil
	}
	c.kept = now
	_, err := c.records.update(ctx, c.run, write)
	return c.written(errors.Join(err, c.Store.KeepQueues(ctx, c.run, c.board.queues())))
}

// written returns the error of a write of the progress; nil for a full disk, which is shown: a
// later progress is written instead.
func (c *control) written(err error) error {
	if err != nil && !rpcerr.DiskFull(err) {
		return err
	}
	c.board.blocked(retry.Awaited{Owner: names.SchedulerService, What: "the progress to be recorded (scheduler)"}, err)
	return nil
}

// drain waits for requestDrain, then lets the controller finish its step and ends the run as
// cancelled.
func (c *control) drain(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-c.draining:
	}
	return c.retry.Until(ctx, retry.Awaited{Owner: names.ControllerService, What: "the controller to finish the current step (learner-controller)"}, func(ctx context.Context) error {
		resp, err := c.Controller.StopRun(ctx, &learnerv1.StopRunRequest{RunId: c.run, Drain: true, Fence: c.fence()})
		if err != nil {
			return err
		}
		c.board.setProgress(resp.GetProgress())
		switch resp.GetProgress().GetPhase() {
		case learnerv1.Phase_PHASE_FINISHED:
			c.ending.end(&ending{state: Succeeded})
		case learnerv1.Phase_PHASE_FAILED: // CompleteRun has the reason
		default:
			c.ending.end(&ending{state: Cancelled, message: fmt.Sprintf("cancelled by request after step %d", resp.GetProgress().GetStep())})
		}
		return nil
	})
}

// advance copies steps and weights from the progress into the record. The step of a record never
// decreases.
func advance(r *Run, p *learnerv1.Progress) {
	r.Step = max(r.GetStep(), p.GetStep())
	if w := p.GetWeights(); w.GetDirectory() != "" {
		r.WeightsDirectory, r.WeightsDigest = w.GetDirectory(), w.GetDigest()
	}
}
