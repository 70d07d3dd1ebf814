// Package storetest is the suite that every storage.Store passes.
package storetest

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/fence"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	"github.com/rollout-rl/rollout/services/storage"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func event(n int, change func(*storage.Event)) *storage.Event {
	e := &storage.Event{
		EventId: fmt.Sprintf("e%d", n), RunId: "run-a", Time: timestamppb.New(start.Add(time.Duration(n) * time.Second)),
		Service: "buffer", Level: eventv1.Level_LEVEL_INFO, Kind: "log", Message: fmt.Sprint(n),
	}
	if change != nil {
		change(e)
	}
	return e
}

// Run runs the suite. open returns an empty store.
func Run(t *testing.T, open func(t *testing.T) storage.Store) {
	fill := func(t *testing.T, events ...*storage.Event) storage.Store {
		t.Helper()
		store := open(t)
		if added, err := store.Append(t.Context(), events); err != nil || added != len(events) {
			t.Fatalf("added %d, %v", added, err)
		}
		return store
	}
	t.Run("an id is stored once", func(t *testing.T) {
		store := fill(t, event(1, nil), event(2, nil))
		added, err := store.Append(t.Context(), []*storage.Event{event(2, nil), event(3, nil), event(3, nil)})
		if err != nil || added != 1 {
			t.Fatalf("added %d, %v", added, err)
		}
		want(t, store, storage.Filter{}, 10, false, "1", "2", "3")
	})
	t.Run("filters", func(t *testing.T) {
		worker := func(id string) func(*storage.Event) {
			return func(e *storage.Event) { e.Service = id }
		}
		store := fill(
			t, event(1, nil), event(2, func(e *storage.Event) { e.RunId = "run-b" }), event(3, func(e *storage.Event) { e.Level = eventv1.Level_LEVEL_ERROR }),
			event(4, func(e *storage.Event) { e.Kind = "phase" }), event(5, worker("inference-worker/inference-0")), event(6, worker("inference-workers")),
		)
		want(t, store, storage.Filter{Run: "run-b"}, 10, false, "2")
		want(t, store, storage.Filter{MinLevel: eventv1.Level_LEVEL_WARN}, 10, false, "3")
		want(t, store, storage.Filter{Kinds: []string{"phase", "other"}}, 10, false, "4")
		want(t, store, storage.Filter{Services: []string{"inference-worker"}}, 10, false, "5")
		want(t, store, storage.Filter{Services: []string{"inference-worker/inference-0", "inference-workers"}}, 10, false, "5", "6")
		want(t, store, storage.Filter{Since: start.Add(5 * time.Second)}, 10, false, "5", "6")
		want(t, store, storage.Filter{}, 2, false, "1", "2")
		want(t, store, storage.Filter{}, 2, true, "5", "6")
		listed, err := store.List(t.Context(), storage.Filter{}, 3, false)
		if err != nil {
			t.Fatal(err)
		}
		want(t, store, storage.Filter{After: listed[2].GetSequence()}, 10, false, "4", "5", "6")
	})
	t.Run("a name with a NUL does not stop other events", func(t *testing.T) {
		store := fill(t, event(1, func(e *storage.Event) {
			e.Step, e.Kind, e.Service, e.Metrics = 1, "step.committed", "a\x00b", map[string]float64{"reward/\x00": 3}
		}), event(2, nil))
		want(t, store, storage.Filter{}, 10, false, "1", "2")
		all, err := store.Series(t.Context(), storage.MetricQuery{Run: "run-a", Limit: 100})
		if err != nil || len(all) != 1 || all[0].GetName() != "reward/\uFFFD" || all[0].GetPoints()[0].GetValue() != 3 {
			t.Fatalf("got %v, %v", all, err)
		}
	})
	t.Run("the events and metrics of a run are deleted", func(t *testing.T) {
		var events []*storage.Event
		for n := range 6000 { // more than one transaction deletes
			events = append(events, event(n, func(e *storage.Event) {
				e.Step, e.Kind, e.Metrics = uint64(n), "step.committed", map[string]float64{"loss": 1, "entropy": 2}
				if n == 3000 {
					e.RunId = "run-b"
				}
			}))
		}
		store := fill(t, events...)
		if err := store.DeleteRun(t.Context(), "run-a", nil); err != nil {
			t.Fatal(err)
		}
		want(t, store, storage.Filter{}, 10, false, "3000")
		for run, names := range map[string]int{"run-a": 0, "run-b": 2} {
			if all, err := store.Series(t.Context(), storage.MetricQuery{Run: run, Limit: 100_000}); err != nil || len(all) != names {
				t.Errorf("%s has %d metrics, %v", run, len(all), err)
			}
		}
	})
	telemetry(t, open)
	t.Run("old events are deleted", func(t *testing.T) {
		store := fill(t, event(1, nil), event(2, func(e *storage.Event) { e.RunId = "" }), event(3, nil))
		if err := store.DeleteBefore(t.Context(), start.Add(3*time.Second)); err != nil {
			t.Fatal(err)
		}
		want(t, store, storage.Filter{}, 10, false, "3")
	})
	t.Run("an artifact has several owners", func(t *testing.T) {
		store := open(t)
		for _, run := range []string{"", "run-a", "run-a", "run-b"} {
			if err := store.Own(t.Context(), run, "x", nil, nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := store.Own(t.Context(), "run-a", "y", nil, nil); err != nil {
			t.Fatal(err)
		}
		owned, err := store.Owned(t.Context(), "run-a", 10)
		if err != nil || !slices.Equal(owned, []string{"x", "y"}) {
			t.Errorf("owned %v, %v", owned, err)
		}
		var removed []string
		for _, digest := range owned {
			if err := store.Disown(t.Context(), "run-a", digest, nil, func() error { removed = append(removed, digest); return nil }); err != nil {
				t.Fatal(err)
			}
		}
		if !slices.Equal(removed, []string{"y"}) {
			t.Errorf("removed %v", removed)
		}
		for digest, want := range map[string][]string{"x": {"", "run-b"}, "y": nil, "z": nil} {
			if owners, err := store.OwnersOf(t.Context(), digest); err != nil || !slices.Equal(owners, want) {
				t.Errorf("owners of %s: %v, %v", digest, owners, err)
			}
		}
	})
	t.Run("a former leader stores and removes nothing", func(t *testing.T) {
		store := open(t)
		if err := errors.Join(store.Own(t.Context(), "run-a", "x", by(1, 5), nil), store.Own(t.Context(), "", "y", by(0, 6), nil)); err != nil {
			t.Fatal(err)
		}
		remove := func() error { t.Error("a former leader removes bytes"); return nil }
		for what, err := range map[string]error{
			"stores":   store.Own(t.Context(), "run-b", "z", by(1, 5), nil),
			"imports":  store.Own(t.Context(), "", "z", by(0, 5), nil),
			"removes":  store.Disown(t.Context(), "run-a", "x", by(1, 5), remove),
			"sweeps":   store.Disown(t.Context(), "", "y", by(0, 5), remove),
			"old run":  store.Disown(t.Context(), "run-a", "x", by(0, 5), remove),
			"unsigned": store.Disown(t.Context(), "run-a", "x", nil, remove),
		} {
			if !errors.Is(err, fence.ErrFenced) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if owned, err := store.Owned(t.Context(), "run-a", 10); err != nil || !slices.Equal(owned, []string{"x"}) {
			t.Errorf("owned %v, %v", owned, err)
		}
		if owners, err := store.OwnersOf(t.Context(), "z"); err != nil || len(owners) > 0 {
			t.Errorf("owners %v, %v", owners, err)
		}
	})
	t.Run("nothing is stored for a deleted run", func(t *testing.T) {
		measured := func(e *storage.Event) { e.Step, e.Kind, e.Metrics = 1, "step.committed", map[string]float64{"loss": 1} }
		store := fill(t, event(1, nil))
		if err := errors.Join(store.Own(t.Context(), "run-b", "shared", nil, nil), store.Own(t.Context(), "run-b", "y", by(1, 5), nil), store.DeleteRun(t.Context(), "run-a", by(1, 5))); err != nil {
			t.Fatal(err)
		}
		late := append([]*storage.Event{event(2, nil), event(3, measured), event(4, func(e *storage.Event) { e.RunId = "run-b" })}, Reports("run-a", "inference-0", 0, 3)...)
		if added, err := store.Append(t.Context(), late); err != nil || added != 1 {
			t.Errorf("added %d, %v", added, err)
		}
		var removed []string
		for digest, by := range map[string]*fencev1.Fence{"x": nil, "z": by(1, 5), "shared": by(2, 6)} {
			err := store.Own(t.Context(), "run-a", digest, by, func() error { removed = append(removed, digest); return nil })
			if !errors.Is(err, fence.ErrDeleted) {
				t.Errorf("%s: %v", digest, err)
			}
		}
		if err := store.Admit(t.Context(), "run-a", by(2, 6)); !errors.Is(err, fence.ErrDeleted) {
			t.Errorf("admitted: %v", err)
		}
		if slices.Sort(removed); !slices.Equal(removed, []string{"x", "z"}) {
			t.Errorf("removed %v", removed)
		}
		want(t, store, storage.Filter{}, 10, false, "4")
		if all, err := store.Series(t.Context(), storage.MetricQuery{Run: "run-a", Limit: 10}); err != nil || len(all) > 0 {
			t.Errorf("metrics %v, %v", all, err)
		}
		if all := series(t, store, storage.TelemetryFilter{Run: "run-a"}); len(all) > 0 {
			t.Errorf("telemetry %v", all)
		}
		if owned, err := store.Owned(t.Context(), "run-a", 10); err != nil || len(owned) > 0 {
			t.Errorf("owned %v, %v", owned, err)
		}
		if err := store.DeleteRun(t.Context(), "run-a", by(1, 5)); err != nil {
			t.Errorf("deleted again: %v", err)
		}
	})
	t.Run("the newest value of a repeated step counts", func(t *testing.T) {
		step := func(n int, step uint64, kind string, metrics map[string]float64) *storage.Event {
			return event(n, func(e *storage.Event) { e.Step, e.Kind, e.Metrics = step, kind, metrics })
		}
		store := fill(
			t, step(1, 1, "step.committed", map[string]float64{"loss": 3, "entropy": 1}), step(2, 2, "step.committed", map[string]float64{"loss": 2}),
			step(3, 2, "step.committed", map[string]float64{"loss": 1.5}), step(4, 2, "eval.finished", map[string]float64{"eval/reward": math.NaN()}),
			step(5, 9, "phase", map[string]float64{"loss": 7}),
		)
		all, err := store.Series(t.Context(), storage.MetricQuery{Run: "run-a", Limit: 100})
		if err != nil || len(all) != 3 || all[0].GetName() != "entropy" || !math.IsNaN(all[1].GetPoints()[0].GetValue()) {
			t.Fatalf("got %v, %v", all, err)
		}
		loss, err := store.Series(t.Context(), storage.MetricQuery{Run: "run-a", Names: []string{"loss"}, From: 2, Limit: 100})
		if err != nil || len(loss) != 1 || len(loss[0].GetPoints()) != 1 || loss[0].GetPoints()[0].GetValue() != 1.5 {
			t.Fatalf("got %v, %v", loss, err)
		}
	})
	t.Run("points are read after another one", func(t *testing.T) {
		store := fill(t, event(1, func(e *storage.Event) {
			e.Step, e.Kind, e.Metrics = 1, "step.committed", map[string]float64{"a/b": 1, "c": 2}
		}), event(2, func(e *storage.Event) {
			e.Step, e.Kind, e.Metrics = 2, "step.committed", map[string]float64{"a/b": 3, "c": 4}
		}))
		var got []float64
		for q := (storage.MetricQuery{Run: "run-a", Limit: 1}); ; {
			page, err := store.Series(t.Context(), q)
			if err != nil || len(page) > 1 {
				t.Fatalf("got %v, %v", page, err)
			}
			if len(page) == 0 {
				break
			}
			point := page[0].GetPoints()[0]
			got = append(got, point.GetValue())
			q.After = &storage.Point{Name: page[0].GetName(), Step: point.GetStep()}
		}
		if !slices.Equal(got, []float64{1, 3, 2, 4}) {
			t.Errorf("got %v", got)
		}
	})
	t.Run("events before a sequence are listed", func(t *testing.T) {
		store := fill(t, event(1, nil), event(2, nil), event(3, nil), event(4, nil))
		listed, err := store.List(t.Context(), storage.Filter{}, 10, false)
		if err != nil {
			t.Fatal(err)
		}
		before := listed[2].GetSequence()
		want(t, store, storage.Filter{Before: before}, 1, true, "2")
		want(t, store, storage.Filter{Before: before}, 10, false, "1", "2")
	})
}

func want(t *testing.T, store storage.Store, f storage.Filter, limit int, newest bool, messages ...string) {
	t.Helper()
	listed, err := store.List(t.Context(), f, limit, newest)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range listed {
		got = append(got, e.GetMessage())
	}
	if !slices.Equal(got, messages) {
		t.Errorf("%+v: got %v, want %v", f, got, messages)
	}
}

// by is the fence of a leader that stores artifacts.
func by(incarnation uint32, epoch uint64) *fencev1.Fence {
	return &fencev1.Fence{Incarnation: incarnation, Role: "snapshot", LeaderEpoch: epoch}
}
