package scheduler

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/telemetry"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// cancel stops a run; with drain it finishes the current step first.
func (s *runs) cancel(ctx context.Context, runID string, drain bool) (*Run, error) {
	_ = s.adoptions.wait(ctx, runID)
	run, err := s.Store.Get(ctx, runID)
	if err != nil {
		return nil, err
	}
	c := s.conductors.get(runID)
	if c == nil || !active(run.GetState()) {
		if run.GetState() != Interrupted && !active(run.GetState()) {
			return run, nil
		}
		return s.records.transition(ctx, runID, Cancelled, func(r *Run) error {
			r.EndTime = timestamppb.New(s.Now().UTC())
			if refusal.Paused(r) {
				r.Reason, r.Message = "", "cancelled by request"
			}
			return nil
		})
	}
	if drain && run.GetState() == Starting && c.board.progress().GetPhase() <= learnerv1.Phase_PHASE_PREPARING { // no step has begun
		c.ending.end(&ending{state: Cancelled, message: "cancelled by request while it started"})
		return s.stopped(ctx, c)
	}
	if !drain || run.GetState() == Pending {
		c.ending.end(&ending{state: Cancelled, message: "cancelled by request"})
		return s.stopped(ctx, c)
	}
	if run.GetState() != Draining {
		run, err = s.records.transition(ctx, runID, Draining, nil)
		if rpcerr.DiskFull(err) { // it stops all the same, and its end is recorded when there is space
			run, err = c.board.record(), nil
			run.State = Draining
		}
		if err != nil {
			return nil, err
		}
	}
	c.control.requestDrain()
	advance(run, c.board.progress())
	return run, nil
}

// cancelWait is how long a cancel without drain waits for the end of the run.
const cancelWait = 2 * time.Second

// stopped waits until a cancelled run has ended, at most cancelWait, and returns its record.
func (s *runs) stopped(ctx context.Context, c *conductor) (*Run, error) {
	timeout := time.NewTimer(cancelWait)
	defer timeout.Stop()
	select {
	case <-c.done:
	case <-timeout.C:
	case <-ctx.Done():
	}
	run, err := s.Store.Get(ctx, c.run)
	if err == nil {
		advance(run, c.board.progress())
	}
	return run, err
}

// complete handles the report of the controller that a run has ended, or is paused until it is
// resumed by request. The report of a former controller is refused.
func (s *runs) complete(ctx context.Context, req *runv1.CompleteRunRequest) error {
	if err := s.adoptions.wait(ctx, req.GetRunId()); err != nil {
		return err
	}
	s.reports.Lock() // a report of the next controller comes before this one, or after it
	defer s.reports.Unlock()
	run, err := s.Store.Get(ctx, req.GetRunId())
	if err != nil {
		return err
	}
	if err := s.Store.Admit(ctx, req.GetRunId(), req.GetFence()); err != nil {
		return err
	}
	c := s.conductors.get(req.GetRunId())
	if c == nil || run.GetIncarnation() != req.GetFence().GetIncarnation() || !active(run.GetState()) {
		s.Log.InfoContext(ctx, "the report about an older incarnation is ignored", telemetry.AttrRun, req.GetRunId(), "incarnation", req.GetFence().GetIncarnation())
		return nil
	}
	if req.GetState() == Paused {
		return s.pauseRefused(ctx, c, req)
	}
	c.ending.end(&ending{state: req.GetState(), reason: req.GetReason(), message: req.GetMessage()})
	return nil
}

// pauseRefused pauses a run whose learner has refused a gradient. Its controller has stopped; its
// workers stay until the run is resumed by request, which begins the next incarnation. A run that
// is being stopped is not paused.
func (s *runs) pauseRefused(ctx context.Context, c *conductor, req *runv1.CompleteRunRequest) error {
	progress, changed := c.board.progress(), false
	run, err := s.records.update(ctx, req.GetRunId(), func(r *Run) error {
		if changed = r.GetIncarnation() == req.GetFence().GetIncarnation() && !refusal.Paused(r); !changed {
			return nil
		}
		if r.GetState() != Paused { // a pause by request or for lack of space gets the new reason
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
		s.records.announce(run)
	}
	return err
}
