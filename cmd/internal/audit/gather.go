package audit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	bufferstore "github.com/rollout-rl/rollout/services/buffer/sqlstore"
	schedulerstore "github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	"github.com/rollout-rl/rollout/services/snapshot"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
)

// Ask gathers the rows of a run (id, prefix or name) from running services. With files it reads the files of its snapshots, else it only
// looks whether they are there.
func Ask(ctx context.Context, c *client.Client, name string, files bool) (*Evidence, error) {
	before, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: name})
	if err != nil {
		return nil, err
	}
	e := &Evidence{Run: before.GetStatus().GetRun(), CursorBefore: before.GetStatus().GetCursor().GetPosition()}
	run := e.Run.GetRunId()
	for page := ""; ; {
		listed, err := c.Snapshot.ListSnapshots(ctx, &snapshotv1.ListSnapshotsRequest{RunId: run, PageSize: 1000, PageToken: page})
		if err != nil {
			return nil, err
		}
		e.Snapshots = append(e.Snapshots, listed.GetSnapshots()...)
		if page = listed.GetNextPageToken(); page == "" {
			break
		}
	}
	if from := e.Run.GetFromSnapshot(); from != "" {
		if got, err := c.Snapshot.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: from}); err == nil { // it may be gone
			e.Snapshots = append(e.Snapshots, got.GetSnapshot())
		}
	}
	err = e.lookAt(run, files, func(content string) (uint64, error) { return fetch(ctx, c, content, files) }, func(snapshot string) bool {
		_, err := c.Snapshot.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: snapshot})
		return rpcerr.Code(err) == codes.NotFound
	})
	if err != nil {
		return nil, err
	}
	stream, err := c.Buffer.ExportLedger(ctx, &bufferv1.ExportLedgerRequest{RunId: run})
	if err != nil {
		return nil, err
	}
	for {
		rows, err := stream.Recv()
		if errors.Is(err, io.EOF) || rpcerr.Reason(err) == ledger.ErrNoLedger.Reason() {
			break
		}
		if err != nil {
			return nil, err
		}
		e.add(rows)
	}
	after, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: run})
	if err != nil {
		return nil, err
	}
	e.CursorAfter = after.GetStatus().GetCursor().GetPosition()
	return e, nil
}

// Read is Ask, of the databases, segments and artifacts of a control plane. Services are not asked.
func Read(ctx context.Context, place Place, name string, files bool) (_ *Evidence, err error) {
	if err := place.check(); err != nil {
		return nil, err
	}
	runs, err := schedulerstore.Open(ctx, place.Databases)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, runs.Close()) }()
	e := &Evidence{}
	if e.Run, err = runs.Resolve(ctx, name); err != nil {
		return nil, err
	}
	run := e.Run.GetRunId()
	before, err := runs.Cursor(ctx, run)
	if err != nil {
		return nil, err
	}
	if e.Snapshots, err = readSnapshots(ctx, place.Databases, e.Run); err != nil {
		return nil, err
	}
	cas, err := place.CAS()
	if err != nil {
		return nil, err
	}
	if err := e.lookAt(run, files, func(content string) (uint64, error) { return readFile(ctx, cas, content, files) }, func(snapshot string) bool {
		now, err := readSnapshots(ctx, place.Databases, e.Run)
		return err == nil && !slices.ContainsFunc(now, func(s *snapshotv1.Snapshot) bool { return s.GetSnapshotId() == snapshot })
	}); err != nil {
		return nil, err
	}
	if err := e.readLedger(ctx, place, run); err != nil && !errors.Is(err, ledger.ErrNoLedger) {
		return nil, err
	}
	after, err := runs.Cursor(ctx, run)
	e.CursorBefore, e.CursorAfter = before.Position, after.Position
	return e, err
}

// fetch reads an artifact, or its beginning: the index of the storage service may name what its disk has lost.
func fetch(ctx context.Context, c *client.Client, content string, whole bool) (read uint64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: content})
	if err != nil {
		return 0, err
	}
	hash := id.NewHasher()
	for {
		got, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && whole && hash.ID() != content:
			return read, blob.ErrCorrupt
		case errors.Is(err, io.EOF), err == nil && !whole:
			return read, nil
		case err != nil:
			return read, err
		}
		read += uint64(len(got.GetChunk()))
		_, _ = hash.Write(got.GetChunk())
	}
}

// readFile is fetch, of a store of artifacts.
func readFile(ctx context.Context, cas *blob.CAS, content string, whole bool) (uint64, error) {
	if !whole {
		_, err := cas.Stat(ctx, content)
		return 0, err
	}
	r, err := cas.Open(ctx, content)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	n, err := io.Copy(io.Discard, r)
	return uint64(n), err
}

// lookAt looks at each file of the run's snapshots. gone reports whether a snapshot was removed meanwhile: a run that goes on makes newer ones.
func (e *Evidence) lookAt(run string, files bool, look func(content string) (uint64, error), gone func(snapshot string) bool) error {
	looked := map[string]bool{}
	for _, s := range e.Snapshots {
		if s.GetRunId() != run {
			continue
		}
		removed := false
		for _, f := range s.GetFiles() {
			content := f.GetDigest()
			if removed || looked[content] {
				continue
			}
			read, err := look(content)
			switch {
			case err == nil:
			case rpcerr.Code(err) == codes.NotFound:
				if removed = gone(s.GetSnapshotId()); !removed {
					e.Missing = append(e.Missing, content)
				}
			case rpcerr.Code(err) == codes.DataLoss:
				e.Corrupt = append(e.Corrupt, content)
			default:
				return fmt.Errorf("read file %s of snapshot %s: %w", f.GetPath(), s.GetSnapshotId(), err)
			}
			looked[content] = !removed
			if files && err == nil {
				e.Files.Whole, e.Files.Bytes = e.Files.Whole+1, e.Files.Bytes+read
			}
		}
	}
	return nil
}

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
	if errors.Is(err, snapshot.ErrNotFound) { // it may be gone
		return all, nil
	}
	return append(all, from), err
}

func (e *Evidence) readLedger(ctx context.Context, place Place, run string) (err error) {
	store, err := bufferstore.Open(ctx, place.Databases)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	return buffer.Export(ctx, store, run, place.payloads(run), func(rows *bufferv1.ExportLedgerResponse) error {
		e.add(rows)
		return nil
	})
}

func (e *Evidence) add(rows *bufferv1.ExportLedgerResponse) {
	if rows.GetLedger() != nil {
		e.Ledger = rows.GetLedger()
	}
	e.Segments = append(e.Segments, rows.GetSegments()...)
	e.Weights = append(e.Weights, rows.GetWeights()...)
	e.Steps = append(e.Steps, rows.GetSteps()...)
	e.Groups = append(e.Groups, rows.GetGroups()...)
	e.Samples = append(e.Samples, rows.GetSamples()...)
}
