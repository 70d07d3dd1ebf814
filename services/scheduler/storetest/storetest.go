// Package storetest is the conformance suite of scheduler.Store.
package storetest

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	planformat "github.com/rollout-rl/rollout/libs/plan"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
)

// Run runs the suite. open returns an empty store, which is closed when the test ends.
func Run(t *testing.T, open func(t *testing.T) scheduler.Store) {
	for name, test := range map[string]func(*testing.T, scheduler.Store){
		"create is idempotent":      createIsIdempotent,
		"update":                    update,
		"updates follow each other": updatesFollowEachOther,
		"cursor":                    cursor,
		"resolve":                   resolve,
		"list":                      list,
		"queues":                    queues,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

// Sample makes the record of a run.
func Sample(id, name string, state scheduler.State) *scheduler.Run {
	return &scheduler.Run{RunId: id, Name: name, State: state, Plan: &planv1.Plan{Format: planformat.Format}, Incarnation: 1}
}

func create(t *testing.T, s scheduler.Store, id, name string, state scheduler.State) *scheduler.Run {
	t.Helper()
	run, err := s.Create(t.Context(), Sample(id, name, state), "", scheduler.Cursor{})
	if err != nil {
		t.Fatal(err)
	}
	return run
}

func createIsIdempotent(t *testing.T, s scheduler.Store) {
	first, err := s.Create(t.Context(), Sample("run-1", "a", scheduler.Pending), "key", scheduler.Cursor{Position: 9, First: 9, FirstStep: 3})
	if err != nil {
		t.Fatal(err)
	}
	again, err := s.Create(t.Context(), Sample("run-2", "a", scheduler.Pending), "key", scheduler.Cursor{})
	if err != nil || !proto.Equal(first, again) {
		t.Fatalf("a repeat made %v, %v", again, err)
	}
	if got, err := s.ByKey(t.Context(), "key"); err != nil || got.GetRunId() != "run-1" {
		t.Fatalf("by key: %v, %v", got, err)
	}
	if _, err := s.ByKey(t.Context(), "other"); !errors.Is(err, scheduler.ErrNotFound) {
		t.Fatalf("unknown key: %v", err)
	}
	if _, err := s.Get(t.Context(), "run-2"); !errors.Is(err, scheduler.ErrNotFound) {
		t.Fatalf("the repeat was kept: %v", err)
	}
	create(t, s, "run-3", "a", scheduler.Pending) // runs without a key are not duplicates
	create(t, s, "run-4", "a", scheduler.Pending)
	if _, err := s.Create(t.Context(), Sample("run-3", "a", scheduler.Pending), "", scheduler.Cursor{}); err == nil {
		t.Fatal("an id was used twice")
	}
}

func update(t *testing.T, s scheduler.Store) {
	create(t, s, "run-1", "a", scheduler.Pending)
	run, err := s.Update(t.Context(), "run-1", func(r *scheduler.Run) error {
		r.State, r.Step = scheduler.Running, 4
		return nil
	})
	if err != nil || run.GetStep() != 4 {
		t.Fatalf("got %v, %v", run, err)
	}
	if got, err := s.Get(t.Context(), "run-1"); err != nil || !proto.Equal(got, run) {
		t.Fatalf("read back %v, %v", got, err)
	}
	refused := errors.New("no")
	if _, err := s.Update(t.Context(), "run-1", func(r *scheduler.Run) error { r.Step = 9; return refused }); !errors.Is(err, refused) {
		t.Fatalf("got %v", err)
	}
	if got, _ := s.Get(t.Context(), "run-1"); got.GetStep() != 4 {
		t.Fatalf("a refused change was kept: %v", got)
	}
	if _, err := s.Update(t.Context(), "run-9", func(*scheduler.Run) error { return nil }); !errors.Is(err, scheduler.ErrNotFound) {
		t.Fatalf("unknown run: %v", err)
	}
}

func updatesFollowEachOther(t *testing.T, s scheduler.Store) {
	create(t, s, "run-1", "a", scheduler.Pending)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 5 {
				if _, err := s.Update(t.Context(), "run-1", func(r *scheduler.Run) error { r.Step++; return nil }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got, err := s.Get(t.Context(), "run-1"); err != nil || got.GetStep() != 40 {
		t.Fatalf("step %d, %v", got.GetStep(), err)
	}
}

func cursor(t *testing.T, s scheduler.Store) {
	if _, err := s.Create(t.Context(), Sample("run-1", "a", scheduler.Pending), "", scheduler.Cursor{Position: 6, First: 6, FirstStep: 2}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		from, to uint64
		want     error
	}{{6, 8, nil}, {6, 8, nil}, {6, 9, scheduler.ErrCursor}, {8, 8, scheduler.ErrCursor}, {8, 7, scheduler.ErrCursor}, {8, 1 << 40, nil}} {
		if err := s.Advance(t.Context(), "run-1", c.from, c.to); !errors.Is(err, c.want) {
			t.Errorf("%d to %d: %v, want %v", c.from, c.to, err, c.want)
		}
	}
	got, err := s.Cursor(t.Context(), "run-1")
	if want := (scheduler.Cursor{Position: 1 << 40, First: 6, FirstStep: 2}); err != nil || got != want {
		t.Errorf("cursor %+v, %v", got, err)
	}
	if err := s.Advance(t.Context(), "run-9", 0, 1); !errors.Is(err, scheduler.ErrCursor) {
		t.Errorf("unknown run: %v", err)
	}
	if _, err := s.Cursor(t.Context(), "run-9"); !errors.Is(err, scheduler.ErrNotFound) {
		t.Errorf("unknown run: %v", err)
	}
}

func resolve(t *testing.T, s scheduler.Store) {
	create(t, s, "run-aa1", "first", scheduler.Pending)
	create(t, s, "run-aa2", "second", scheduler.Pending)
	create(t, s, "run-ab1", "first", scheduler.Pending)
	create(t, s, "run-ab12", "run-aa1", scheduler.Pending) // a name that is another's id
	for ref, want := range map[string]any{
		"run-aa2": "run-aa2", "run-aa1": "run-aa1", "run-ab1": "run-ab1", "first": "run-ab1", "second": "run-aa2", "run-ab12": "run-ab12",
		"run-aa": scheduler.ErrAmbiguous, "third": scheduler.ErrNotFound, "run-b": scheduler.ErrNotFound,
	} {
		got, err := s.Resolve(t.Context(), nil, ref)
		if wanted, failing := want.(error); failing {
			if !errors.Is(err, wanted) {
				t.Errorf("%s: %v, %v", ref, got, err)
			}
			continue
		}
		if err != nil || got.GetRunId() != want {
			t.Errorf("%s: %v, %v", ref, got.GetRunId(), err)
		}
	}
}

func list(t *testing.T, s scheduler.Store) {
	for n, state := range []scheduler.State{scheduler.Succeeded, scheduler.Running, scheduler.Failed, scheduler.Running} {
		create(t, s, fmt.Sprint("run-", n), "a", state)
	}
	for name, c := range map[string]struct {
		filter scheduler.Filter
		want   []string
	}{
		"all":      {scheduler.Filter{}, []string{"run-3", "run-2", "run-1", "run-0"}},
		"running":  {scheduler.Filter{States: []scheduler.State{scheduler.Running}}, []string{"run-3", "run-1"}},
		"two":      {scheduler.Filter{States: []scheduler.State{scheduler.Failed, scheduler.Succeeded}}, []string{"run-2", "run-0"}},
		"a page":   {scheduler.Filter{After: "run-3", Limit: 2}, []string{"run-2", "run-1"}},
		"past all": {scheduler.Filter{After: "run-0"}, nil},
	} {
		runs, err := s.List(t.Context(), c.filter)
		var got []string
		for _, run := range runs {
			got = append(got, run.GetRunId())
		}
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func queues(t *testing.T, s scheduler.Store) {
	create(t, s, "run-1", "a", scheduler.Pending)
	if got, err := s.Queues(t.Context(), "run-1"); err != nil || !proto.Equal(got, &runv1.Queues{}) {
		t.Fatalf("at first %v, %v", got, err)
	}
	for _, want := range []*runv1.Queues{{Consumed: 5, Ready: 1}, {}} {
		if err := s.KeepQueues(t.Context(), "run-1", want); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Queues(t.Context(), "run-1"); err != nil || !proto.Equal(got, want) {
			t.Fatalf("got %v, %v", got, err)
		}
	}
	if _, err := s.Queues(t.Context(), "run-9"); !errors.Is(err, scheduler.ErrNotFound) {
		t.Fatalf("unknown run: %v", err)
	}
}
