package record

import (
	"context"
	"errors"
	"io"
	"slices"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/trainstate"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// eventsPage is how many events are requested at a time.
const eventsPage = 1000

// Services calls running services. Materialize writes to the disk of the snapshot service.
type Services struct{ Client *client.Client }

// Runs implements Reader.
func (s Services) Runs(ctx context.Context, page *runv1.ListRunsRequest) (*runv1.ListRunsResponse, error) {
	return s.Client.Scheduler.ListRuns(ctx, page)
}

// Run implements Reader.
func (s Services) Run(ctx context.Context, name string) (*runv1.RunStatus, error) {
	got, err := s.Client.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: name})
	return got.GetStatus(), err
}

// Events implements Reader.
func (s Services) Events(ctx context.Context, filter *storagev1.EventFilter, limit int, newest bool) ([]*eventv1.Event, error) {
	var pages [][]*eventv1.Event
	_, err := paging.Some(limit, eventsPage, func(size int, token string) (int, string, error) {
		got, err := s.Client.Events.ListEvents(ctx, &storagev1.ListEventsRequest{Filter: filter, PageSize: uint32(size), PageToken: token, Newest: newest})
		pages = append(pages, got.GetEvents())
		return len(got.GetEvents()), got.GetNextPageToken(), err
	})
	if newest {
		slices.Reverse(pages)
	}
	return slices.Concat(pages...), err
}

// Metrics implements Reader.
func (s Services) Metrics(ctx context.Context, runID string, visit func(*storagev1.Series)) error {
	return paging.All(func(token string) (string, error) {
		got, err := s.Client.Events.QueryMetrics(ctx, &storagev1.QueryMetricsRequest{RunId: runID, PageToken: token})
		for _, series := range got.GetSeries() {
			visit(series)
		}
		return got.GetNextPageToken(), err
	})
}

// Telemetry implements Reader.
func (s Services) Telemetry(ctx context.Context, request *storagev1.QueryTelemetryRequest) (all []*storagev1.TelemetrySeries, err error) {
	stream, err := s.Client.Events.QueryTelemetry(ctx, request)
	if err != nil {
		return nil, err
	}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, part.GetSeries())
	}
}

// Snapshots implements Reader.
func (s Services) Snapshots(ctx context.Context, page *snapshotv1.ListSnapshotsRequest) (*snapshotv1.ListSnapshotsResponse, error) {
	return s.Client.Snapshot.ListSnapshots(ctx, page)
}

// Snapshot implements Reader.
func (s Services) Snapshot(ctx context.Context, id string) (*snapshotv1.Snapshot, error) {
	got, err := s.Client.Snapshot.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: id})
	return got.GetSnapshot(), err
}

// NewestSnapshot implements Reader.
func (s Services) NewestSnapshot(ctx context.Context, runID string) (*snapshotv1.Snapshot, error) {
	got, err := s.Client.Snapshot.ListSnapshots(ctx, &snapshotv1.ListSnapshotsRequest{
		RunId: runID, Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, PageSize: 1,
	})
	if err != nil || len(got.GetSnapshots()) == 0 {
		return nil, err
	}
	return got.GetSnapshots()[0], nil
}

// Materialize implements Reader.
func (s Services) Materialize(ctx context.Context, snap *snapshotv1.Snapshot, folder string) error {
	_, err := s.Client.Snapshot.MaterializeSnapshot(ctx, &snapshotv1.MaterializeSnapshotRequest{
		SnapshotId: snap.GetSnapshotId(), Directory: folder, Paths: trainstate.Paths(snap),
	})
	return err
}

// Artifact implements Reader.
func (s Services) Artifact(ctx context.Context, content string, w io.Writer) error {
	stream, err := s.Client.Artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: content})
	if err != nil {
		return err
	}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := w.Write(part.GetChunk()); err != nil {
			return err
		}
	}
}
