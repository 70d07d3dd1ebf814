package scheduler

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/refusal"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// cancel stops a run: with drain the step in hand is finished first.
func (s *service) cancel(ctx context.Context, runID string, drain bool) (*Run, error) {
	run, err := s.Store.Get(ctx, runID)
	if err != nil {
		return nil, err
	}
	c := s.conductor(runID)
	if c == nil || !active(run.GetState()) {
		if run.GetState() != Interrupted && !active(run.GetState()) {
			return run, nil
		}
		return s.transition(ctx, runID, Cancelled, func(r *Run) error {
			r.EndTime = timestamppb.New(s.Now().UTC())
			if refusal.Paused(r) {
				r.Reason, r.Message = "", "cancelled by request"
			}
			return nil
		})
	}
	if drain && run.GetState() == Starting && c.progress().GetPhase() <= learnerv1.Phase_PHASE_PREPARING { // no step is in hand
		c.end(&ending{state: Cancelled, message: "cancelled by request while it started"})
		return s.stopped(ctx, c)
	}
	if !drain || run.GetState() == Pending {
		c.end(&ending{state: Cancelled, message: "cancelled by request"})
		return s.stopped(ctx, c)
	}
	if run.GetState() != Draining {
		if run, err = s.transition(ctx, runID, Draining, nil); err != nil {
			return nil, err
		}
	}
	c.drain()
	advance(run, c.progress())
	return run, nil
}

// cancelPatience is how long whoever cancels a run at once waits to be told that it has ended.
const cancelPatience = 2 * time.Second

// stopped is the record of a run that is being cancelled, once it has ended; after cancelPatience as it stands then.
func (s *service) stopped(ctx context.Context, c *conductor) (*Run, error) {
	patience := time.NewTimer(cancelPatience)
	defer patience.Stop()
	select {
	case <-c.done:
	case <-patience.C:
	case <-ctx.Done():
	}
	run, err := s.Store.Get(ctx, c.id)
	if err == nil {
		advance(run, c.progress())
	}
	return run, err
}

// complete is the controller's word that a run has ended, or stands still until somebody resumes it.
func (s *service) complete(ctx context.Context, req *runv1.CompleteRunRequest) error {
	run, err := s.Store.Get(ctx, req.GetRunId())
	if err != nil {
		return err
	}
	c := s.conductor(req.GetRunId())
	if c == nil || run.GetIncarnation() != req.GetIncarnation() || !active(run.GetState()) {
		s.Log.InfoContext(ctx, "the end of an older incarnation is ignored", "run", req.GetRunId(), "incarnation", req.GetIncarnation())
		return nil
	}
	if req.GetState() == Paused {
		return s.refuse(ctx, c, req)
	}
	c.end(&ending{state: req.GetState(), reason: req.GetReason(), message: req.GetMessage()})
	return nil
}

// refuse pauses a run whose learner has refused a gradient. Its drive has stopped; its workers stay until somebody resumes the run,
// which begins the next incarnation. A run that is being stopped meanwhile is not paused, it is stopped.
func (s *service) refuse(ctx context.Context, c *conductor, req *runv1.CompleteRunRequest) error {
	progress, changed := c.progress(), false
	run, err := s.update(ctx, req.GetRunId(), func(r *Run) error {
		if changed = r.GetIncarnation() == req.GetIncarnation() && !refusal.Paused(r); !changed {
			return nil
		}
		if r.GetState() != Paused { // else by request, or for want of room: now there is a better reason
			if err := move(r, Paused); err != nil {
				return err
			}
		}
		r.Reason, r.Message = req.GetReason(), req.GetMessage()
		advance(r, progress)
		return nil
	})
	if errors.Is(err, ErrTransition) {
		return nil
	}
	if err == nil && changed {
		s.announce(run)
	}
	return err
}
