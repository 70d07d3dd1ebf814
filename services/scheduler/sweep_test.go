package scheduler

import (
	"context"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// archive is a store of runs that ended, each a time ago, and a bus that has streams of all of them and of another mesh's.
type archive struct {
	Store
	Bus
	now  time.Time
	runs map[string]*Run
	left []string
}

func (e *archive) Get(_ context.Context, id string) (*Run, error) {
	if run := e.runs[id]; run != nil {
		return run, nil
	}
	return nil, status.Error(codes.NotFound, id)
}

func (e *archive) Runs(context.Context) ([]string, error) { return slices.Clone(e.left), nil }

func (e *archive) DeleteRun(_ context.Context, run string) error {
	e.left = slices.DeleteFunc(e.left, func(id string) bool { return id == run })
	return nil
}

func TestStreamsThatNobodyUsesAreRemoved(t *testing.T) {
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
	s := newService(Config{}, Deps{Store: e, Bus: e, Now: func() time.Time { return e.now }})
	if err := s.sweepStreams(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{"another mesh's", "failed just now", "cancelled just now", "PENDING", "STARTING", "RUNNING", "PAUSED", "DRAINING", "INTERRUPTED"}
	if !slices.Equal(e.left, want) {
		t.Errorf("streams of %v are left", e.left)
	}
}
