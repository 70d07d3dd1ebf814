package audit

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// reasonNoLedger is the reason with which the buffer refuses to export a ledger that does not
// exist.
const reasonNoLedger = "LEDGER_NOT_FOUND"

// Services are the clients that Gather calls.
type Services struct {
	Scheduler runv1.SchedulerServiceClient
	Snapshots snapshotv1.SnapshotServiceClient
	Artifacts storagev1.ArtifactServiceClient
	Buffer    bufferv1.BufferServiceClient
}

// Gather reads the rows of a run (id, prefix of an id, or name) from running services. Where the
// scheduler has no such run it reads the ledger of that id. With readFiles it reads the files of
// the run's snapshots and weights, else it only checks that they exist. Close the evidence.
func Gather(ctx context.Context, s Services, name string, readFiles bool) (*Evidence, error) {
	e := &Evidence{}
	if err := s.gather(ctx, e, name, readFiles); err != nil {
		_ = e.Close()
		return nil, err
	}
	return e, nil
}

func (s Services) gather(ctx context.Context, e *Evidence, name string, readFiles bool) error {
	before, err := s.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: name})
	if rpcerr.Code(err) == codes.NotFound {
		e.Run, e.Unscheduled = &runv1.Run{RunId: name}, true
		if none := s.ledger(ctx, e); rpcerr.Reason(none) != reasonNoLedger && rpcerr.Code(none) != codes.InvalidArgument { // an invalid id
			return none
		}
	}
	if err != nil {
		return err
	}
	e.Run, e.CursorBefore = before.GetStatus().GetRun(), before.GetStatus().GetCursor().GetPosition()
	run := e.Run.GetRunId()
	if e.Snapshots, err = s.snapshots(ctx, e.Run); err != nil {
		return err
	}
	err = e.CheckFiles(readFiles,
		func(content string) (uint64, error) { return s.readArtifact(ctx, content, readFiles) },
		func(snapshot string) bool {
			_, err := s.Snapshots.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: snapshot})
			return rpcerr.Code(err) == codes.NotFound
		})
	if err != nil {
		return err
	}
	if err := e.CheckWeights(e.Run.GetDirectory(), readFiles); err != nil {
		return err
	}
	if err := s.ledger(ctx, e); err != nil && rpcerr.Reason(err) != reasonNoLedger {
		return err
	}
	after, err := s.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: run})
	if err != nil {
		return err
	}
	e.CursorAfter = after.GetStatus().GetCursor().GetPosition()
	return nil
}

// ledger adds the rows of the run's ledger.
func (s Services) ledger(ctx context.Context, e *Evidence) error {
	stream, err := s.Buffer.ExportLedger(ctx, &bufferv1.ExportLedgerRequest{RunId: e.Run.GetRunId()})
	if err != nil {
		return err
	}
	for {
		rows, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := e.Add(rows); err != nil {
			return err
		}
	}
}

// snapshots returns the snapshots of a run, and the one that it started from if that still exists.
func (s Services) snapshots(ctx context.Context, run *runv1.Run) (out []*snapshotv1.Snapshot, err error) {
	err = paging.All(func(token string) (string, error) {
		listed, err := s.Snapshots.ListSnapshots(ctx, &snapshotv1.ListSnapshotsRequest{RunId: run.GetRunId(), PageSize: 1000, PageToken: token})
		out = append(out, listed.GetSnapshots()...)
		return listed.GetNextPageToken(), err
	})
	if err != nil {
		return nil, err
	}
	if from := run.GetFromSnapshot(); from != "" {
		if got, err := s.Snapshots.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: from}); err == nil {
			out = append(out, got.GetSnapshot())
		}
	}
	return out, nil
}

// readArtifact reads an artifact to its end if whole, else its first chunk: the index of the
// storage service may list content that its disk has lost.
func (s Services) readArtifact(ctx context.Context, content string, whole bool) (read uint64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.Artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: content})
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

// Add adds exported rows. The ledger comes first.
func (e *Evidence) Add(rows *bufferv1.ExportLedgerResponse) error {
	if rows.GetLedger() != nil {
		e.Ledger = rows.GetLedger()
	}
	e.Segments = append(e.Segments, rows.GetSegments()...)
	e.Weights = append(e.Weights, rows.GetWeights()...)
	e.Lineages = append(e.Lineages, rows.GetLineages()...)
	return e.rows().add(e.Ledger.GetConfig().GetRows(), rows)
}

// rows returns the rows. Those of new evidence are in the folder of temporary files.
func (e *Evidence) rows() *Rows {
	if e.Rows == nil {
		e.Rows = NewRows("")
	}
	return e.Rows
}

// Close deletes the temporary files.
func (e *Evidence) Close() error {
	if e.Rows == nil {
		return nil
	}
	return e.Rows.Close()
}

// CheckFiles calls read for each file of the run's snapshots and records the result; count adds the
// bytes read to the report. removed reports whether a snapshot was deleted since it was listed,
// which an active run does.
func (e *Evidence) CheckFiles(count bool, read func(content string) (uint64, error), removed func(snapshot string) bool) error {
	done := map[string]bool{}
	for _, s := range e.Snapshots {
		if s.GetRunId() != e.Run.GetRunId() {
			continue
		}
		gone := false
		for _, f := range s.GetFiles() {
			content := f.GetDigest()
			if gone || done[content] {
				continue
			}
			n, err := read(content)
			switch {
			case err == nil:
			case rpcerr.Code(err) == codes.NotFound:
				if gone = removed(s.GetSnapshotId()); !gone {
					e.Missing = append(e.Missing, content)
				}
			case rpcerr.Code(err) == codes.DataLoss:
				e.Corrupt = append(e.Corrupt, content)
			default:
				return fmt.Errorf("read file %s of snapshot %s: %w", f.GetPath(), s.GetSnapshotId(), err)
			}
			done[content] = !gone
			if count && err == nil {
				e.Files.Whole, e.Files.Bytes = e.Files.Whole+1, e.Files.Bytes+n
			}
		}
	}
	return nil
}
