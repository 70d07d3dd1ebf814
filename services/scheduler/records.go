package scheduler

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/telemetry"
	"github.com/rollout-rl/rollout/proto/gen/names"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// records changes the records of runs, and reports each change of state as an event. Safe for
// concurrent use.
type records struct {
	store  Store
	events Events
	log    *slog.Logger
	now    func() time.Time

	mu     sync.Mutex
	boards map[string]*attached // of active runs
}

// attached is a board that shows the record of a run. Its lock is held from the write to the store
// until the board shows it, so that the board shows the writes in their order.
type attached struct {
	sync.Mutex
	board *board
}

func newRecords(deps Deps) *records {
	return &records{store: deps.Store, events: deps.Events, log: deps.Log, now: deps.Now, boards: map[string]*attached{}}
}

// attach shows the record of a run on a board until the returned function is called. A later board
// takes the place of an earlier one.
func (r *records) attach(runID string, b *board) (detach func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := &attached{board: b}
	r.boards[runID] = a
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.boards[runID] == a {
			delete(r.boards, runID)
		}
	}
}

// update changes the record of a run.
func (r *records) update(ctx context.Context, runID string, change func(*Run) error) (*Run, error) {
	r.mu.Lock()
	a := r.boards[runID]
	r.mu.Unlock()
	if a == nil {
		return r.store.Update(ctx, runID, change)
	}
	a.Lock()
	defer a.Unlock()
	run, err := r.store.Update(ctx, runID, change)
	if err == nil {
		a.board.setRecord(run)
	}
	return run, err
}

// writable returns lease.ErrFenced if another scheduler leads: the store refuses writes of this
// one.
func (r *records) writable(ctx context.Context, runID string) (*Run, error) {
	return r.update(ctx, runID, func(*Run) error { return nil })
}

// transition changes the state. check (may be nil) can refuse or change the record before. If the
// run has the state already, only check is applied.
func (r *records) transition(ctx context.Context, runID string, to State, check func(*Run) error) (*Run, error) {
	same := false
	run, err := r.update(ctx, runID, func(run *Run) error {
		if check != nil {
			if err := check(run); err != nil {
				return err
			}
		}
		if same = run.GetState() == to; same {
			return nil
		}
		return move(run, to)
	})
	if err == nil && !same {
		r.announce(run)
	}
	return run, err
}

func (r *records) interrupt(ctx context.Context, runID, why string) error {
	_, err := r.transition(ctx, runID, Interrupted, func(run *Run) error {
		run.Message = why + "; `rollout run --resume " + runID + "` continues it"
		return nil
	})
	return err
}

// announce reports the state of a run.
func (r *records) announce(run *Run) {
	r.emit(run, stateEvent(run))
	r.log.Info("run changed", telemetry.AttrEvent, false, telemetry.AttrRun, run.GetRunId(), "state", stateName(run.GetState()), "reason", run.GetReason())
}

// emit completes an event and sends it.
func (r *records) emit(run *Run, e *eventv1.Event) {
	if e.GetEventId() == "" {
		now := r.now().UTC()
		e.EventId, e.Time = id.New(now), timestamppb.New(now)
	}
	e.RunId, e.Service = run.GetRunId(), names.SchedulerService
	r.events.Emit(e)
}

// stateEvent is the run.state event. The event of an end has an id that follows from the record, so
// that storage drops duplicates.
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

func stateName(st State) string { return st.String()[len("RUN_STATE_"):] }
