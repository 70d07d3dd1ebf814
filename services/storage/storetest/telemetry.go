package storetest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/services/storage"
)

// reported is a report of a worker after a number of seconds.
func reported(run, worker string, second int, metrics map[string]float64) *storage.Event {
	return event(second, func(e *storage.Event) {
		e.EventId, e.RunId, e.Service, e.Kind = fmt.Sprintf("%s/%s/%d", run, worker, second), run, "inference-worker/"+worker, "sampling"
		e.Metrics, e.Time = metrics, timestamppb.New(midnight.Add(time.Duration(second)*time.Second))
	})
}

var midnight = time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)

// names of what inference workers report.
var names = []string{"samples", "samples_per_second", "time/engine", "time/engine_forward", "tokens_per_second"}

// Reports are those of one worker for some seconds, with random values, which compress least.
func Reports(run, worker string, from, to int) []*storage.Event {
	dice := rand.New(rand.NewPCG(uint64(from), uint64(to))) //nolint:gosec // reproducible
	var out []*storage.Event
	for second := from; second < to; second++ {
		metrics := map[string]float64{}
		for _, name := range names {
			metrics[name] = 1000 * math.Exp(dice.NormFloat64())
		}
		out = append(out, reported(run, worker, second, metrics))
	}
	return out
}

// At is the time of a second of Reports.
func At(second int) time.Time { return midnight.Add(time.Duration(second) * time.Second) }

func series(t *testing.T, store storage.Store, f storage.TelemetryFilter) []storage.TelemetrySeries {
	t.Helper()
	var all []storage.TelemetrySeries
	if err := store.Telemetry(t.Context(), f, tiers, func(s storage.TelemetrySeries) error { all = append(all, s); return nil }); err != nil {
		t.Fatal(err)
	}
	return all
}

var tiers = storage.Tiers(time.Hour, 24*time.Hour)

func telemetry(t *testing.T, open func(t *testing.T) storage.Store) {
	ramp := func(t *testing.T, store storage.Store, seconds int) { // the value is the second
		t.Helper()
		var events []*storage.Event
		for second := range seconds {
			events = append(events, reported("run-a", "inference-0", second, map[string]float64{"x": float64(second), "nan": math.NaN()}))
		}
		for range 2 { // redelivered ones are stored once
			if added, err := store.Append(t.Context(), events); err != nil || added != 0 {
				t.Fatalf("added %d events, %v", added, err)
			}
		}
	}
	only := func(t *testing.T, store storage.Store, f storage.TelemetryFilter) []storage.Bucket {
		t.Helper()
		f.Run = "run-a"
		all := series(t, store, f)
		if len(all) != 1 || all[0].Name != "x" || all[0].Service != "inference-worker/inference-0" {
			t.Fatalf("got %v", all)
		}
		return all[0].Buckets
	}
	t.Run("telemetry is no event", func(t *testing.T) {
		store := open(t)
		ramp(t, store, 3)
		want(t, store, storage.Filter{}, 10, false)
		got := only(t, store, storage.TelemetryFilter{})
		if len(got) != 3 || got[2] != (storage.Bucket{Start: midnight.Unix() + 2, Seconds: 1, Count: 1, Min: 2, Mean: 2, Max: 2}) {
			t.Errorf("got %v", got)
		}
	})
	t.Run("old telemetry is summarized", func(t *testing.T) {
		store := open(t)
		ramp(t, store, 4*3600)
		now := 4 * 3600
		for range 2 { // the second time has nothing to do
			if err := store.Downsample(t.Context(), At(now), tiers); err != nil {
				t.Fatal(err)
			}
		}
		got := only(t, store, storage.TelemetryFilter{})
		count, last := uint64(0), int64(0)
		for _, b := range got {
			if b.Start < last {
				t.Fatalf("%v begins before the end of the bucket before it", b)
			}
			last = b.Start + b.Seconds
			count += b.Count
			first := float64(b.Start - midnight.Unix())
			if b.Min != first || b.Max != first+float64(b.Seconds)-1 || math.Abs(b.Mean-(b.Min+b.Max)/2) > 1e-6*b.Mean {
				t.Fatalf("bucket %+v", b)
			}
		}
		// Three hours of ten seconds, and one of single seconds.
		if count != 4*3600 || len(got) != 3*360+3600 || got[0].Seconds != 10 || got[len(got)-1].Seconds != 1 {
			t.Errorf("%d reports in %d buckets", count, len(got))
		}
		minutes := only(t, store, storage.TelemetryFilter{Since: At(3600), Until: At(3600 + 600), Seconds: 60})
		if len(minutes) != 10 || minutes[0].Count != 60 || minutes[0].Min != 3600 || minutes[9].Max != 4199 {
			t.Errorf("by the minute: %v", minutes)
		}
		if err := store.Downsample(t.Context(), At(30*3600), tiers); err != nil {
			t.Fatal(err)
		}
		if got = only(t, store, storage.TelemetryFilter{}); len(got) != 4*12 || got[0].Seconds != 300 || got[0].Count != 300 {
			t.Errorf("after a day: %d buckets, %+v", len(got), got[0])
		}
	})
	t.Run("a late report joins its bucket", func(t *testing.T) {
		store := open(t)
		ramp(t, store, 600)
		downsample := func() {
			t.Helper()
			if err := store.Downsample(t.Context(), At(3*3600), tiers); err != nil {
				t.Fatal(err)
			}
		}
		downsample()
		if _, err := store.Append(t.Context(), []*storage.Event{reported("run-a", "inference-0", 7, map[string]float64{"x": 1000, "nan": math.NaN()})}); err != nil {
			t.Fatal(err)
		}
		downsample()
		got := only(t, store, storage.TelemetryFilter{})
		if len(got) != 60 || got[0].Count != 11 || got[0].Max != 1000 || got[0].Min != 0 {
			t.Errorf("%d buckets, the first is %+v", len(got), got[0])
		}
	})
	t.Run("telemetry of a run is deleted", func(t *testing.T) {
		store := open(t)
		for _, run := range []string{"run-a", "run-b"} {
			if _, err := store.Append(t.Context(), Reports(run, "inference-0", 0, 6000)); err != nil {
				t.Fatal(err)
			}
		}
		if err := store.Downsample(t.Context(), At(4000), tiers); err != nil {
			t.Fatal(err)
		}
		if err := store.DeleteRun(t.Context(), "run-a", nil); err != nil {
			t.Fatal(err)
		}
		if a, b := series(t, store, storage.TelemetryFilter{Run: "run-a"}), series(t, store, storage.TelemetryFilter{Run: "run-b"}); len(a) != 0 || len(b) != len(names) {
			t.Errorf("%d series of the deleted run, %d of the other", len(a), len(b))
		}
	})
	t.Run("services and names are selected", func(t *testing.T) {
		store := open(t)
		for _, worker := range []string{"inference-0", "inference-1"} {
			if _, err := store.Append(t.Context(), Reports("run-a", worker, 0, 5)); err != nil {
				t.Fatal(err)
			}
		}
		got := series(t, store, storage.TelemetryFilter{Run: "run-a", Services: []string{"inference-worker/inference-1"}, Names: []string{"samples"}})
		if len(got) != 1 || got[0].Service != "inference-worker/inference-1" || got[0].Name != "samples" || len(got[0].Buckets) != 5 {
			t.Errorf("got %v", got)
		}
	})
}
