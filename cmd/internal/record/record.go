// Package record reads stored runs, events and snapshots: from running services, or from the state
// folder of a control plane that is not running. It changes nothing.
package record

import (
	"context"
	"encoding/json"
	"io"

	"github.com/rollout-rl/rollout/libs/completion"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Reader reads stored runs.
type Reader interface {
	// Runs returns a page of runs, newest first.
	Runs(ctx context.Context, page *runv1.ListRunsRequest) (*runv1.ListRunsResponse, error)
	// Run returns the run with an id, a unique prefix of an id, or a name.
	Run(ctx context.Context, name string) (*runv1.RunStatus, error)
	// Events returns at most limit events, oldest first: the first ones, or with newest the last ones.
	Events(ctx context.Context, filter *storagev1.EventFilter, limit int, newest bool) ([]*eventv1.Event, error)
	// Telemetry returns what workers reported every second.
	Telemetry(ctx context.Context, request *storagev1.QueryTelemetryRequest) ([]*storagev1.TelemetrySeries, error)
	// Metrics calls visit with the metrics of a run by name and step, in parts: a series that
	// continues has the name of the one before.
	Metrics(ctx context.Context, runID string, visit func(*storagev1.Series)) error
	// Snapshots returns a page of snapshots, newest first.
	Snapshots(ctx context.Context, page *snapshotv1.ListSnapshotsRequest) (*snapshotv1.ListSnapshotsResponse, error)
	// Snapshot returns the snapshot with an id or a unique prefix of an id.
	Snapshot(ctx context.Context, id string) (*snapshotv1.Snapshot, error)
	// NewestSnapshot returns the newest training state of a run; may be nil.
	NewestSnapshot(ctx context.Context, runID string) (*snapshotv1.Snapshot, error)
	// Materialize writes the files of a snapshot into a new folder, verified.
	Materialize(ctx context.Context, s *snapshotv1.Snapshot, folder string) error
	// Artifact writes the bytes with a content id to w, and fails if they have another one.
	Artifact(ctx context.Context, content string, w io.Writer) error
}

// LargestPage is the largest page of runs, and of snapshots.
const LargestPage = 1000

// page is how many events are read at a time: events with completions are large.
const page = 200

// Each calls visit with each event that matches the filter, oldest first.
func Each(ctx context.Context, r Reader, filter *storagev1.EventFilter, visit func(*eventv1.Event) error) error {
	for {
		events, err := r.Events(ctx, filter, page, false)
		if err != nil {
			return err
		}
		for _, e := range events {
			if err := visit(e); err != nil {
				return err
			}
		}
		if len(events) < page {
			return nil
		}
		filter.AfterSequence = events[len(events)-1].GetSequence()
	}
}

// Kept holds the stored completions of a step.
type Kept struct {
	Step        uint64
	Completions []completion.Completion
}

// Completions calls visit with the stored completions of each step, in order. A step that a
// recovery committed again is visited once.
func Completions(ctx context.Context, r Reader, runID string, visit func(Kept) error) error {
	last := uint64(0)
	return Each(ctx, r, completions(runID), func(e *eventv1.Event) error {
		if e.GetStep() <= last {
			return nil
		}
		last = e.GetStep()
		return visit(kept(e))
	})
}

// NewestCompletions returns the completions of the newest step with completions; may be empty.
func NewestCompletions(ctx context.Context, r Reader, runID string) (Kept, error) {
	events, err := r.Events(ctx, completions(runID), 1, true)
	if err != nil || len(events) == 0 {
		return Kept{}, err
	}
	return kept(events[0]), nil
}

// FirstCompletions returns the completions of the first step with completions.
func FirstCompletions(ctx context.Context, r Reader, runID string) (Kept, error) {
	events, err := r.Events(ctx, completions(runID), 1, false)
	if err != nil || len(events) == 0 {
		return Kept{}, err
	}
	return kept(events[0]), nil
}

func completions(runID string) *storagev1.EventFilter {
	return &storagev1.EventFilter{RunId: runID, Kinds: []string{"completions"}}
}

func kept(e *eventv1.Event) Kept {
	k := Kept{Step: e.GetStep()}
	_ = json.Unmarshal([]byte(e.GetAttributes()["completions"]), &k.Completions) // an event without completions has none to show
	return k
}
