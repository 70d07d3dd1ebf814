package scheduler

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/telemetry"
	"github.com/rollout-rl/rollout/proto/gen/names"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// transition changes the state; check (may be nil) looks at the run before and may alter it. To the state that it has already
// it does nothing.
func (s *service) transition(ctx context.Context, runID string, to State, check func(*Run) error) (*Run, error) {
	same := false
	run, err := s.update(ctx, runID, func(r *Run) error {
		if check != nil {
			if err := check(r); err != nil {
				return err
			}
		}
		if same = r.GetState() == to; same {
			return nil
		}
		return move(r, to)
	})
	if err == nil && !same {
		s.announce(run)
	}
	return run, err
}

// update changes the record of a run. Its conductor sees the changes in the order in which they were written.
func (s *service) update(ctx context.Context, runID string, change func(*Run) error) (*Run, error) {
	c := s.conductor(runID)
	if c == nil {
		return s.Store.Update(ctx, runID, change)
	}
	c.records.Lock()
	defer c.records.Unlock()
	run, err := s.Store.Update(ctx, runID, change)
	if err == nil {
		c.see(run)
	}
	return run, err
}

func (s *service) interrupt(ctx context.Context, runID, why string) error {
	_, err := s.transition(ctx, runID, Interrupted, func(r *Run) error {
		r.Message = why + "; `rollout run --resume " + runID + "` goes on"
		return nil
	})
	return err
}

// announce tells of the state that a run has now.
func (s *service) announce(run *Run) {
	s.emit(run, stateEvent(run))
	s.Log.Info("run changed", telemetry.AttrEvent, false, telemetry.AttrRun, run.GetRunId(), "state", stateName(run.GetState()), "reason", run.GetReason())
}

// stateEvent is the run.state event. That of an end has an id of its own, made from the record: told again, storage knows it.
func stateEvent(run *Run) *eventv1.Event {
	level := eventv1.Level_LEVEL_INFO
	if run.GetState() == Failed {
		level = eventv1.Level_LEVEL_ERROR
	}
	name := stateName(run.GetState())
	message := "run is " + name
	if run.GetMessage() != "" {
		message += ": " + run.GetMessage()
	}
	e := &eventv1.Event{Kind: "run.state", Level: level, Message: message, Step: run.GetStep(),
		Attributes: map[string]string{"state": name, "reason": run.GetReason()}}
	if slices.Contains(endStates, run.GetState()) && run.GetEndTime() != nil {
		e.Time = run.GetEndTime()
		e.EventId = id.At(e.GetTime().AsTime(), fmt.Sprintf("run.state %s %d %s", run.GetRunId(), run.GetIncarnation(), name))
	}
	return e
}

// emit fills in what an event does not say itself.
func (s *service) emit(run *Run, e *eventv1.Event) {
	if e.GetEventId() == "" {
		now := s.Now().UTC()
		e.EventId, e.Time = id.New(now), timestamppb.New(now)
	}
	e.RunId, e.Service = run.GetRunId(), names.SchedulerService
	s.Events.Emit(e)
}

func stateName(st State) string { return st.String()[len("RUN_STATE_"):] }
