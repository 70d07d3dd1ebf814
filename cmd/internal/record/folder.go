package record

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/rollout-rl/rollout/cmd/internal/evidence"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/replay"
	"github.com/rollout-rl/rollout/libs/sqldb"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	bufferstore "github.com/rollout-rl/rollout/services/buffer/sqlstore"
	"github.com/rollout-rl/rollout/services/scheduler"
	schedulerstore "github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	"github.com/rollout-rl/rollout/services/snapshot"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	"github.com/rollout-rl/rollout/services/storage"
	storagestore "github.com/rollout-rl/rollout/services/storage/sqlstore"
)

// pointsPage is how many points of metrics are read at a time.
const pointsPage = 10_000

// Folder reads a state folder until Close.
type Folder struct {
	state     string
	runs      *schedulerstore.Store
	events    *storagestore.Store
	snapshots *snapshotstore.Store
	ledgers   *bufferstore.Store // nil: there is no database of ledgers
}

// Check returns an error if a state folder lacks a database that Folder reads.
func Check(state string) error {
	for _, service := range []string{"scheduler", "storage", "snapshot"} {
		if _, err := os.Stat(filepath.Join(state, "db", service+".sqlite")); err != nil {
			return exit.New(exit.NoInput, "name the state folder with --state-dir, or a running control plane with --server",
				"no %s database to read: %w", service, err)
		}
	}
	return nil
}

// Open opens the databases of a state folder.
func Open(ctx context.Context, state string) (_ *Folder, err error) {
	if err := Check(state); err != nil {
		return nil, err
	}
	place := sqldb.Archive(filepath.Join(state, "db"))
	f := &Folder{state: state}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if f.runs, err = schedulerstore.Open(ctx, place); err != nil {
		return nil, err
	}
	if f.events, err = storagestore.Open(ctx, place); err != nil {
		return nil, err
	}
	if f.snapshots, err = snapshotstore.Open(ctx, place); err != nil {
		return nil, err
	}
	if _, missing := os.Stat(filepath.Join(string(place), "buffer.sqlite")); missing == nil {
		f.ledgers, err = bufferstore.Open(ctx, place)
	}
	return f, err
}

// Close closes the databases.
func (f *Folder) Close() error {
	var errs []error
	if f.runs != nil {
		errs = append(errs, f.runs.Close())
	}
	if f.events != nil {
		errs = append(errs, f.events.Close())
	}
	if f.snapshots != nil {
		errs = append(errs, f.snapshots.Close())
	}
	if f.ledgers != nil {
		errs = append(errs, f.ledgers.Close())
	}
	return errors.Join(errs...)
}

// Runs implements Reader.
func (f *Folder) Runs(ctx context.Context, page *runv1.ListRunsRequest) (*runv1.ListRunsResponse, error) {
	size, response := int(cmp.Or(page.GetPageSize(), 100)), &runv1.ListRunsResponse{}
	for after := page.GetPageToken(); ; {
		runs, err := f.runs.List(ctx, scheduler.Filter{Project: page.Project, After: after, Limit: size + 1})
		if err != nil || len(runs) == 0 {
			return response, err
		}
		for _, run := range runs { // which of them are interrupted is not stored
			if err := f.interrupt(ctx, run); err != nil {
				return nil, err
			}
			if states := page.GetStates(); len(states) > 0 && !slices.Contains(states, run.GetState()) {
				continue
			}
			if len(response.Runs) == size {
				response.NextPageToken = response.Runs[size-1].GetRunId()
				return response, nil
			}
			response.Runs = append(response.Runs, run)
		}
		after = runs[len(runs)-1].GetRunId()
	}
}

// Run implements Reader. The queues are the last stored ones; workers are empty.
func (f *Folder) Run(ctx context.Context, name string) (*runv1.RunStatus, error) {
	run, err := f.runs.Resolve(ctx, nil, name)
	if err != nil {
		return nil, err
	}
	if err := f.interrupt(ctx, run); err != nil {
		return nil, err
	}
	queues, err := f.runs.Queues(ctx, run.GetRunId())
	return &runv1.RunStatus{Run: run, Queues: queues}, err
}

// interrupt changes a run that a dead control plane left active to the state and steps that the
// scheduler will store when it starts: interrupted, with the steps of the ledger, which is ahead of
// the run's record.
func (f *Folder) interrupt(ctx context.Context, run *runv1.Run) error {
	if live.Over(run) {
		return nil
	}
	live.MarkInterrupted(run)
	if f.ledgers == nil {
		return nil
	}
	err := f.ledgers.View(ctx, run.GetRunId(), func(r ledger.Reader) error {
		step := r.Ledger().Step
		if step <= run.GetStep() {
			return nil
		}
		run.Step = step
		last, err := r.Step(ctx, step)
		folder := scheduler.WeightsFolder(run, step)
		if _, missing := os.Stat(folder); err == nil && last != nil && missing == nil {
			run.WeightsDirectory, run.WeightsDigest = folder, last.WeightsDigest
		}
		return err
	})
	if errors.Is(err, ledger.ErrNoLedger) {
		return nil
	}
	return err
}

// Events implements Reader.
func (f *Folder) Events(ctx context.Context, filter *storagev1.EventFilter, limit int, newest bool) ([]*eventv1.Event, error) {
	return f.events.List(ctx, storage.FilterOf(filter), limit, newest)
}

// Metrics implements Reader.
func (f *Folder) Metrics(ctx context.Context, runID string, visit func(*storagev1.Series)) error {
	for q := (storage.MetricQuery{Run: runID, Limit: pointsPage}); ; {
		page, err := f.events.Series(ctx, q)
		if err != nil || len(page) == 0 {
			return err
		}
		for _, series := range page {
			visit(series)
		}
		last := page[len(page)-1]
		q.After = &storage.Point{Name: last.GetName(), Step: last.GetPoints()[len(last.GetPoints())-1].GetStep()}
	}
}

// Telemetry implements Reader.
func (f *Folder) Telemetry(ctx context.Context, request *storagev1.QueryTelemetryRequest) (all []*storagev1.TelemetrySeries, err error) {
	err = f.events.Telemetry(ctx, storage.TelemetryFilterOf(request), storage.Tiers(0, 0), func(s storage.TelemetrySeries) error {
		all = append(all, s.Message())
		return nil
	})
	return all, err
}

// Snapshots implements Reader.
func (f *Folder) Snapshots(ctx context.Context, page *snapshotv1.ListSnapshotsRequest) (*snapshotv1.ListSnapshotsResponse, error) {
	size := int(cmp.Or(page.GetPageSize(), 100))
	found, err := f.snapshots.List(ctx, snapshot.Filter{Run: page.GetRunId(), Kind: page.GetKind(), After: page.GetPageToken(), Limit: size + 1})
	response := &snapshotv1.ListSnapshotsResponse{}
	response.Snapshots, response.NextPageToken = paging.Cut(found, size, (*snapshotv1.Snapshot).GetSnapshotId)
	return response, err
}

// Snapshot implements Reader.
func (f *Folder) Snapshot(ctx context.Context, id string) (*snapshotv1.Snapshot, error) {
	return f.snapshots.Get(ctx, id)
}

// NewestSnapshot implements Reader.
func (f *Folder) NewestSnapshot(ctx context.Context, runID string) (*snapshotv1.Snapshot, error) {
	found, err := f.snapshots.List(ctx, snapshot.Filter{Run: runID, Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Limit: 1})
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return found[0], nil
}

// Materialize implements Reader.
func (f *Folder) Materialize(ctx context.Context, s *snapshotv1.Snapshot, folder string) error {
	artifacts, err := evidence.Folder(f.state).Artifacts()
	if err != nil {
		return err
	}
	return replay.Artifacts{CAS: artifacts}.Snapshot(ctx, s, folder)
}

// Artifact implements Reader.
func (f *Folder) Artifact(ctx context.Context, content string, w io.Writer) (err error) {
	artifacts, err := evidence.Folder(f.state).Artifacts()
	if err != nil {
		return err
	}
	r, err := artifacts.Open(ctx, content)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	_, err = io.Copy(w, r)
	return err
}
