package scheduler

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/id"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// archive is a store of ended runs, and a bus that has their streams and those of another mesh.
type archive struct {
	Store
	Bus
	now  time.Time
	runs map[string]*Run
	left []string
}

func (a *archive) Get(_ context.Context, id string) (*Run, error) {
	if run := a.runs[id]; run != nil {
		return run, nil
	}
	return nil, status.Error(codes.NotFound, id)
}

func (a *archive) Runs(context.Context) ([]string, error) { return slices.Clone(a.left), nil }

func (a *archive) DeleteRun(_ context.Context, run string) error {
	a.left = slices.DeleteFunc(a.left, func(id string) bool { return id == run })
	return nil
}

func (a *archive) List(_ context.Context, f Filter) (out []*Run, _ error) {
	for _, run := range a.runs {
		if slices.Contains(f.States, run.GetState()) {
			out = append(out, run)
		}
	}
	return out, nil
}

// listener records events.
type listener struct {
	Events
	heard []*eventv1.Event
}

func (l *listener) Emit(e *eventv1.Event) { l.heard = append(l.heard, e) }

// A process that dies between the record of an end and its event leaves the event to the next one.
// Storage drops duplicates by id.
func TestLastEndsAreReportedAgain(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	e := &archive{runs: map[string]*Run{
		"running":   {RunId: "running", State: Running},
		"succeeded": {RunId: "succeeded", State: Succeeded, Step: 7, EndTime: timestamppb.New(now.Add(-time.Hour)), Incarnation: 1},
		"failed":    {RunId: "failed", State: Failed, Reason: "WORKER_CRASH_LOOP", EndTime: timestamppb.New(now.Add(-time.Hour - resendWithin)), Incarnation: 2},
		"older":     {RunId: "older", State: Cancelled, EndTime: timestamppb.New(now.Add(-time.Hour - resendWithin - time.Second)), Incarnation: 1},
	}}
	first, again := &listener{}, &listener{}
	old := newRecords(Deps{Store: e, Events: first, Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return now.Add(-time.Hour) }})
	old.announce(e.runs["succeeded"])
	old.announce(e.runs["failed"])
	deps := Deps{Store: e, Events: again, Now: func() time.Time { return now }}
	if err := (&takeover{Deps: deps, records: newRecords(deps)}).resend(t.Context()); err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(again.heard, func(x, y *eventv1.Event) int { return -strings.Compare(x.GetRunId(), y.GetRunId()) })
	if len(again.heard) != 2 {
		t.Fatalf("reported again: %v", again.heard)
	}
	for i, event := range again.heard {
		if !proto.Equal(event, first.heard[i]) || !id.Valid(event.GetEventId()) {
			t.Errorf("first, then again:\n%v\n%v", first.heard[i], event)
		}
	}
	if a, b := again.heard[0].GetEventId(), again.heard[1].GetEventId(); a == b {
		t.Errorf("both are %s", a)
	}
	e.runs["failed"].Incarnation++
	if stateEvent(e.runs["failed"]).GetEventId() == first.heard[1].GetEventId() {
		t.Error("the end of the next incarnation has the same event id")
	}
}

func TestUnusedStreamsAreRemoved(t *testing.T) {
	t.Parallel()
	e := &archive{now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), runs: map[string]*Run{}, left: []string{"another mesh's"}}
	add := func(id string, state State, ago time.Duration) {
		e.runs[id] = &Run{RunId: id, State: state}
		if ago > 0 {
			e.runs[id].EndTime = timestamppb.New(e.now.Add(-ago))
		}
		e.left = append(e.left, id)
	}
	add("succeeded", Succeeded, time.Second)
	add("failed just now", Failed, streamsKept-time.Second)
	add("failed", Failed, streamsKept+time.Second)
	add("cancelled just now", Cancelled, streamsKept-time.Second)
	add("cancelled", Cancelled, streamsKept+time.Second)
	for _, state := range []State{Pending, Starting, Running, Paused, Draining, Interrupted} {
		add(stateName(state), state, 0)
	}
	s := &takeover{Deps: Deps{Store: e, Bus: e, Now: func() time.Time { return e.now }}}
	if err := s.sweepStreams(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{"another mesh's", "failed just now", "cancelled just now", "PENDING", "STARTING", "RUNNING", "PAUSED", "DRAINING", "INTERRUPTED"}
	if !slices.Equal(e.left, want) {
		t.Errorf("streams of %v are left", e.left)
	}
}
