package scheduler

import (
	"context"
	"errors"
	"fmt"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/id"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// pause stops issuing. A run that a refused gradient has paused keeps that reason, because its
// controller has stopped.
func (s *runs) pause(ctx context.Context, runID string) (*Run, error) {
	_ = s.adoptions.wait(ctx, runID)
	return s.records.transition(ctx, runID, Paused, func(r *Run) error {
		if st := r.GetState(); st != Starting && st != Running && st != Paused {
			return ErrNotPausable.With("run", runID).With("state", st.String()).
				WithMessage("run %s is %s: only a run that is starting or running can be paused", runID, stateName(st))
		}
		if refusal.Paused(r) {
			return nil
		}
		return clearReason(r) // a request to stop replaces the earlier reason
	})
}

// resume continues a run by request; see the state machine in run.go.
func (s *runs) resume(ctx context.Context, runID string) (*Run, error) {
	_ = s.adoptions.wait(ctx, runID)
	return s.restart(ctx, runID, false)
}

// restart continues a run. adopted: not by request, this scheduler takes over the run of another
// one; a paused run stays paused.
func (s *runs) restart(ctx context.Context, runID string, adopted bool) (*Run, error) {
	run, err := s.Store.Get(ctx, runID)
	if err != nil {
		return nil, err
	}
	orphan := active(run.GetState()) && s.conductors.get(runID) == nil // its scheduler died or lost the lead
	switch run.GetState() {
	case Succeeded:
		return nil, finished(run)
	case Deleting:
		return nil, ErrNotResumable.With("run", runID).With("state", run.GetState().String()).WithMessage("run %s is being deleted", runID)
	case Draining:
		if !orphan {
			return nil, ErrNotResumable.With("run", runID).With("state", run.GetState().String()).
				WithMessage("run %s is being stopped", runID).Fix("resume it when it has stopped: `rollout runs show " + runID + "` shows its state")
		}
	case Pending, Starting, Running:
		if !orphan {
			return run, nil
		}
	case Paused:
		if !orphan && !refusal.Paused(run) {
			return s.records.transition(ctx, runID, Starting, clearReason) // RUNNING again with the next progress
		}
	}
	to := Starting
	if orphan && run.GetState() == Paused && (adopted || !refusal.Paused(run)) {
		to = Paused // the death of a scheduler must not end a pause
	}
	lock, err := id.CanonicalJSON(run.GetPlan())
	if err != nil {
		return nil, fmt.Errorf("write the plan of %s: %w", runID, err)
	}
	own := planformat.InputsOf(s.folder(runID))
	_, made, err := s.verify(ctx, lock, run.GetBaseDir(), own)
	if err != nil {
		return nil, resumable(run, err)
	}
	if err := takeInputs(run.GetPlan(), made, own); err != nil { // of a run whose folder was deleted
		return nil, err
	}
	if old := s.conductors.get(runID); old != nil && old.incarnation == run.GetIncarnation() { // it is about to end
		if refusal.Paused(run) {
			old.ending.end(handOver)
		}
		select {
		case <-old.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.begin(ctx, run, to)
}

// resumable adds to an error about changed inputs how to continue in a new run: the record of a run
// does not change, so with other inputs it is another run.
func resumable(run *Run, err error) error {
	if e, ok := rpcerr.From(err); ok && errors.Is(e, ErrPlanChanged) {
		return e.Fix("restore them, or start a new run from the newest snapshot of this one with the changed inputs: " +
			"`rollout run --resume " + run.GetRunId() + " --accept-changes`")
	}
	return err
}

// begin records the next incarnation of a run in state to (Starting or Paused), and starts it. seen
// is the record on which the caller decided; if another call has begun an incarnation since, its
// result is returned.
func (s *runs) begin(ctx context.Context, seen *Run, to State) (*Run, error) {
	s.beginning.Lock()
	defer s.beginning.Unlock()
	if c := s.conductors.get(seen.GetRunId()); c != nil && c.inherited && c.incarnation == seen.GetIncarnation() && !c.left() {
		return s.Store.Get(ctx, seen.GetRunId()) // adopted since the caller decided
	}
	var begun bool
	run, err := s.records.update(ctx, seen.GetRunId(), func(r *Run) error {
		if begun = r.GetIncarnation() == seen.GetIncarnation(); !begun {
			return nil
		}
		if active(r.GetState()) && to != Paused {
			if err := move(r, Interrupted); err != nil {
				return err
			}
		}
		r.Incarnation++
		s.setDirectory(r)
		if to == Paused {
			return nil // keeps its reason: backpressure ends by itself, a refused gradient needs a person
		}
		r.Reason, r.Message, r.EndTime = "", "", nil
		return move(r, to)
	})
	if err != nil || !begun {
		return run, err
	}
	s.records.announce(run)
	crashpoint.Here("scheduler/resumed") // the next incarnation is recorded and not active
	return run, s.conductors.start(run, nil)
}
