// Package record reads what is stored of a run: from running services, or from the state folder of a control plane that does not
// run. Nothing is started and nothing is changed.
package record

import (
	"context"

	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Reader reads what is stored of runs.
type Reader interface {
	// Runs are the newest first, a page of them.
	Runs(ctx context.Context, page *runv1.ListRunsRequest) (*runv1.ListRunsResponse, error)
	// Run is the run of an id, a unique prefix of one, or a name.
	Run(ctx context.Context, name string) (*runv1.RunStatus, error)
	// Events are at most limit events, oldest first: the first, or with newest the last ones.
	Events(ctx context.Context, filter *storagev1.EventFilter, limit int, newest bool) ([]*eventv1.Event, error)
	// Metrics are the series of a run, by name.
	Metrics(ctx context.Context, runID string) ([]*storagev1.Series, error)
	// Snapshots are the newest first, a page of them.
	Snapshots(ctx context.Context, page *snapshotv1.ListSnapshotsRequest) (*snapshotv1.ListSnapshotsResponse, error)
	// Snapshot is the one of an id or a unique prefix of one.
	Snapshot(ctx context.Context, id string) (*snapshotv1.Snapshot, error)
	// NewestSnapshot is the newest training state of a run; nil where there is none.
	NewestSnapshot(ctx context.Context, runID string) (*snapshotv1.Snapshot, error)
	// Materialize writes the files of a snapshot into a new folder, verified.
	Materialize(ctx context.Context, s *snapshotv1.Snapshot, folder string) error
}

// page is how many events are read at a time: those that hold completions are large.
const page = 200

// Each calls told with each event that the filter takes, oldest first.
func Each(ctx context.Context, r Reader, filter *storagev1.EventFilter, told func(*eventv1.Event) error) error {
	for {
		events, err := r.Events(ctx, filter, page, false)
		if err != nil {
			return err
		}
		for _, e := range events {
			if err := told(e); err != nil {
				return err
			}
		}
		if len(events) < page {
			return nil
		}
		filter.AfterSequence = events[len(events)-1].GetSequence()
	}
}
