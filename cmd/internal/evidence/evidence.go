// Package evidence reads what an audit needs from the databases, segments and artifacts of a
// control plane, without its services.
package evidence

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"slices"

	"github.com/rollout-rl/rollout/libs/audit"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/sqldb"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	bufferstore "github.com/rollout-rl/rollout/services/buffer/sqlstore"
	"github.com/rollout-rl/rollout/services/scheduler"
	schedulerstore "github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	"github.com/rollout-rl/rollout/services/snapshot"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
)

// Read reads the rows of a run (id, prefix of an id, or name). Where the scheduler has no such run
// it reads the ledger of that id. With readFiles it reads the files of the run's snapshots and
// weights, else it only checks that they exist. Close the evidence.
func Read(ctx context.Context, place Place, name string, readFiles bool) (*audit.Evidence, error) {
	e := &audit.Evidence{}
	if err := read(ctx, place, name, readFiles, e); err != nil {
		_ = e.Close()
		return nil, err
	}
	return e, nil
}

func read(ctx context.Context, place Place, name string, readFiles bool, e *audit.Evidence) (err error) {
	if err := place.check(); err != nil {
		return err
	}
	runs, err := schedulerstore.Open(ctx, place.Databases)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, runs.Close()) }()
	if e.Run, err = runs.Resolve(ctx, nil, name); errors.Is(err, scheduler.ErrNotFound) {
		e.Run, e.Unscheduled = &runv1.Run{RunId: name}, true
		if none := readLedger(ctx, place, name, e); !errors.Is(none, ledger.ErrNoLedger) {
			return none
		}
	}
	if err != nil {
		return err
	}
	run := e.Run.GetRunId()
	before, err := runs.Cursor(ctx, run)
	if err != nil {
		return err
	}
	if e.Snapshots, err = readSnapshots(ctx, place.Databases, e.Run); err != nil {
		return err
	}
	artifacts, err := place.Artifacts()
	if err != nil {
		return err
	}
	err = e.CheckFiles(readFiles,
		func(content string) (uint64, error) { return readArtifact(ctx, artifacts, content, readFiles) },
		func(snapshot string) bool {
			now, err := readSnapshots(ctx, place.Databases, e.Run)
			return err == nil && !slices.ContainsFunc(now, func(s *snapshotv1.Snapshot) bool { return s.GetSnapshotId() == snapshot })
		})
	if err != nil {
		return err
	}
	if err := e.CheckWeights(filepath.Join(place.runs, run), readFiles); err != nil {
		return err
	}
	if err := readLedger(ctx, place, run, e); err != nil && !errors.Is(err, ledger.ErrNoLedger) {
		return err
	}
	after, err := runs.Cursor(ctx, run)
	e.CursorBefore, e.CursorAfter = before.Position, after.Position
	return err
}

func readArtifact(ctx context.Context, artifacts *blob.CAS, content string, whole bool) (uint64, error) {
	if !whole {
		_, err := artifacts.Stat(ctx, content)
		return 0, err
	}
	r, err := artifacts.Open(ctx, content)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	n, err := io.Copy(io.Discard, r)
	return uint64(n), err
}

// readSnapshots returns the snapshots of a run, and the one that it started from if that still
// exists.
func readSnapshots(ctx context.Context, place sqldb.Place, run *runv1.Run) (_ []*snapshotv1.Snapshot, err error) {
	store, err := snapshotstore.Open(ctx, place)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	all, err := store.List(ctx, snapshot.Filter{Run: run.GetRunId()})
	if err != nil || run.GetFromSnapshot() == "" {
		return all, err
	}
	from, err := store.Get(ctx, run.GetFromSnapshot())
	if errors.Is(err, snapshot.ErrNotFound) {
		return all, nil
	}
	return append(all, from), err
}

func readLedger(ctx context.Context, place Place, run string, e *audit.Evidence) (err error) {
	store, err := bufferstore.Open(ctx, place.Databases)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	return buffer.Export(ctx, store, run, place.payloads(run), e.Add)
}
