package scheduler

import (
	"context"
	"errors"
	"fmt"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// pause stops issuing. A run that a refused gradient has paused keeps that reason: nobody drives it.
func (s *service) pause(ctx context.Context, runID string) (*Run, error) {
	return s.transition(ctx, runID, Paused, func(r *Run) error {
		if st := r.GetState(); st != Starting && st != Running && st != Paused {
			return ErrNotPausable.With("run", runID).With("state", st.String()).
				WithMessage("run %s is %s: only a run that is starting or running can be paused", runID, stateName(st))
		}
		if refusal.Paused(r) {
			return nil
		}
		return unreason(r) // by request, whatever it was paused for before
	})
}

// resume goes on with a run because somebody asked for it; see the drawing in run.go.
func (s *service) resume(ctx context.Context, runID string) (*Run, error) {
	return s.goOn(ctx, runID, false)
}

// goOn goes on with a run. adopted: nobody asked, this scheduler takes over what another one left; what was paused stays so.
func (s *service) goOn(ctx context.Context, runID string, adopted bool) (*Run, error) {
	run, err := s.Store.Get(ctx, runID)
	if err != nil {
		return nil, err
	}
	orphan := active(run.GetState()) && s.conductor(runID) == nil // of a scheduler that died or stepped down
	switch run.GetState() {
	case Succeeded:
		return nil, finished(run)
	case Draining:
		if !orphan {
			return nil, ErrNotResumable.With("run", runID).With("state", run.GetState().String()).
				WithMessage("run %s is being stopped", runID).Fix("resume it when it has stopped: `rollout runs show " + runID + "` tells")
		}
	case Pending, Starting, Running:
		if !orphan {
			return run, nil
		}
	case Paused:
		if !orphan && !refusal.Paused(run) {
			return s.transition(ctx, runID, Starting, unreason) // RUNNING again with the controller's next word
		}
	}
	to := Starting
	if orphan && run.GetState() == Paused && (adopted || !refusal.Paused(run)) {
		to = Paused // whoever paused it knows nothing of a scheduler that died
	}
	lock, err := id.CanonicalJSON(run.GetPlan())
	if err != nil {
		return nil, fmt.Errorf("write the plan of %s: %w", runID, err)
	}
	if _, err := s.verify(ctx, lock, run.GetBaseDir()); err != nil {
		return nil, resumable(run, err)
	}
	if old := s.conductor(runID); old != nil && old.incarnation == run.GetIncarnation() { // it has reached its end and is about to leave
		if refusal.Paused(run) {
			old.end(handOver)
		}
		select {
		case <-old.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.begin(ctx, run, to)
}

// resumable says of changed inputs how the run can go on all the same: what it consumed so far stays as it is recorded, so with
// other inputs it is another run.
func resumable(run *Run, err error) error {
	if e, ok := rpcerr.From(err); ok && errors.Is(e, ErrPlanChanged) {
		return e.Fix("restore it, or go on in a new run, from the newest snapshot of this one and with the inputs as they are now: " +
			"`rollout run --resume " + run.GetRunId() + " --accept-changes`")
	}
	return err
}

// begin records the next incarnation of a run that nobody conducts, as to (Starting or Paused), and conducts it. Who saw the run before
// somebody else began it gets what the other made.
func (s *service) begin(ctx context.Context, seen *Run, to State) (*Run, error) {
	var begun bool
	run, err := s.update(ctx, seen.GetRunId(), func(r *Run) error {
		if begun = r.GetIncarnation() == seen.GetIncarnation(); !begun {
			return nil
		}
		if active(r.GetState()) && to != Paused {
			if err := move(r, Interrupted); err != nil {
				return err
			}
		}
		r.Incarnation++
		s.house(r)
		if to == Paused {
			return nil // with its reason: what waits for room goes on by itself when there is some, what waits for a person does not
		}
		r.Reason, r.Message, r.EndTime = "", "", nil
		return move(r, to)
	})
	if err != nil || !begun {
		return run, err
	}
	s.announce(run)
	crashpoint.Here("scheduler/resumed") // the next incarnation is recorded, nobody conducts it
	return run, s.conduct(run)
}
