package audit

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	bufferstore "github.com/rollout-rl/rollout/services/buffer/sqlstore"
	schedulerstore "github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	"github.com/rollout-rl/rollout/services/snapshot"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
)

// Ask gathers the rows of a run (id, prefix or name) from running services.
func Ask(ctx context.Context, c *client.Client, name string) (*Evidence, error) {
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
	state := newestState(e.Snapshots, run)
	if e.Missing, err = missing(state, func(content string) error { return begins(ctx, c, content) }); err != nil {
		return nil, err
	}
	if len(e.Missing) > 0 {
		if _, err := c.Snapshot.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: state.GetSnapshotId()}); rpcerr.Code(err) == codes.NotFound {
			e.Missing = nil // the run went on meanwhile, and a newer one has taken its place
		}
	}
	stream, err := c.Buffer.ExportLedger(ctx, &bufferv1.ExportLedgerRequest{RunId: run})
	if err != nil {
		return nil, err
	}
	for {
		rows, err := stream.Recv()
		if errors.Is(err, io.EOF) || rpcerr.Reason(err) == buffer.ErrNoLedger.Reason() {
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

// Read gathers the rows of a run from the databases, segments and artifacts of a control plane. Services are not asked.
func Read(ctx context.Context, place Place, name string) (_ *Evidence, err error) {
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
	if e.Missing, err = missing(newestState(e.Snapshots, run), func(content string) error {
		_, err := cas.Stat(ctx, content)
		return err
	}); err != nil {
		return nil, err
	}
	if err := e.readLedger(ctx, place, run); err != nil && !errors.Is(err, buffer.ErrNoLedger) {
		return nil, err
	}
	after, err := runs.Cursor(ctx, run)
	e.CursorBefore, e.CursorAfter = before.Position, after.Position
	return e, err
}

// begins reads the beginning of an artifact: the index of the storage service may name what its disk has lost.
func begins(ctx context.Context, c *client.Client, content string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: content})
	if err != nil {
		return err
	}
	if _, err = stream.Recv(); errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// missing asks for each file of a snapshot.
func missing(s *snapshotv1.Snapshot, stat func(content string) error) (out []string, err error) {
	for _, f := range s.GetFiles() {
		err := stat(f.GetDigest())
		if err != nil && rpcerr.Code(err) != codes.NotFound {
			return nil, err
		}
		if err != nil {
			out = append(out, f.GetDigest())
		}
	}
	return out, nil
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
