package scheduler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
)

// control starts the controller and listens to it; it begins again when the controller's process was replaced.
func (c *conductor) control(ctx context.Context) error {
	run := c.record()
	if refusal.Paused(run) { // by an earlier incarnation, and nobody has resumed it: no step is tried
		<-ctx.Done()
		return nil
	}
	for {
		if err := c.insist(ctx, "the controller to take the run (learner-controller)", func(ctx context.Context) error {
			_, err := c.svc.Controller.StartRun(ctx, &learnerv1.StartRunRequest{
				RunId: c.id, Plan: run.GetPlan(), Incarnation: c.incarnation, RunDirectory: run.GetDirectory(),
				FromSnapshot: run.GetFromSnapshot(),
			})
			return err
		}); err != nil {
			return err
		}
		err := c.listen(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil { // the controller has reached its end and says so through CompleteRun or to StopRun
			<-ctx.Done()
			return nil
		}
		c.waitFor("the controller to answer again (learner-controller)", rpcerr.Text(err))
		if err := pause(ctx, 200*time.Millisecond); err != nil {
			return nil
		}
	}
}

// listen follows the progress until the controller ends the stream (nil) or it breaks.
func (c *conductor) listen(ctx context.Context) error {
	stream, err := c.svc.Controller.WatchProgress(ctx, &learnerv1.WatchProgressRequest{RunId: c.id})
	if err != nil {
		return err
	}
	for {
		resp, err := stream.Recv()
		if err != nil {
			return endOfStream(err)
		}
		c.waitFor("the controller to answer again (learner-controller)", "")
		c.seeProgress(resp.GetProgress())
		if err := c.keepProgress(ctx); err != nil {
			return err
		}
	}
}

// drained waits for a request to drain and carries it out.
func (c *conductor) drained(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-c.draining:
	}
	return c.insist(ctx, "the controller to finish the step in hand (learner-controller)", func(ctx context.Context) error {
		resp, err := c.svc.Controller.StopRun(ctx, &learnerv1.StopRunRequest{RunId: c.id, Drain: true, Incarnation: c.incarnation})
		if err != nil {
			return err
		}
		c.seeProgress(resp.GetProgress())
		switch resp.GetProgress().GetPhase() {
		case learnerv1.Phase_PHASE_FINISHED:
			c.end(&ending{state: Succeeded})
		case learnerv1.Phase_PHASE_FAILED: // CompleteRun says why
		default:
			c.end(&ending{state: Cancelled, message: fmt.Sprintf("cancelled by request after step %d", resp.GetProgress().GetStep())})
		}
		return nil
	})
}

// keepProgress writes the progress into the run's record, at once when the state changes, else once a second with the queues: what
// is seen of the run if this process dies.
func (c *conductor) keepProgress(ctx context.Context) error {
	progress, run := c.progress(), c.record()
	begun := progress.GetPhase() > learnerv1.Phase_PHASE_PREPARING && progress.GetPhase() <= learnerv1.Phase_PHASE_SNAPSHOTTING
	if begun && run.GetState() == Starting {
		_, err := c.svc.transition(ctx, c.id, Running, func(r *Run) error {
			advance(r, progress)
			return nil
		})
		if errors.Is(err, ErrTransition) { // paused or ended meanwhile
			return nil
		}
		return err
	}
	c.mu.Lock()
	due := c.svc.Now().Sub(c.kept) >= time.Second
	if due {
		c.kept = c.svc.Now()
	}
	c.mu.Unlock()
	if !due {
		return nil
	}
	_, err := c.svc.update(ctx, c.id, func(r *Run) error {
		advance(r, progress)
		return nil
	})
	return errors.Join(err, c.svc.Store.KeepQueues(ctx, c.id, c.queues()))
}

// advance takes what the progress says of steps and weights into the record; it never goes back.
func advance(r *Run, p *learnerv1.Progress) {
	r.Step = max(r.GetStep(), p.GetStep())
	if w := p.GetWeights(); w.GetDirectory() != "" {
		r.WeightsDirectory, r.WeightsDigest = w.GetDirectory(), w.GetDigest()
	}
}
