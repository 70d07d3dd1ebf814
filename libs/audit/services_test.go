package audit

import (
	"context"
	"errors"
	"io"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// plane answers from an intact run. external is a ledger without a run.
type plane struct {
	evidence *table
	cursors  []uint64 // of the calls of GetRun
	files    map[string]string
	pages    int
	deleted  bool // the snapshots, since they were listed
}

const external = "my-sampler-1"

// The clients of the services: the methods of a plane, and no others.
type (
	noRuns      struct{ runv1.SchedulerServiceClient }
	noSnapshots struct {
		snapshotv1.SnapshotServiceClient
	}
	noArtifacts struct {
		storagev1.ArtifactServiceClient
	}
	noLedgers struct{ bufferv1.BufferServiceClient }

	runs struct {
		*plane
		noRuns
	}
	manifests struct {
		*plane
		noSnapshots
	}
	artifacts struct {
		*plane
		noArtifacts
	}
	ledgers struct {
		*plane
		noLedgers
	}
)

func (p *plane) services() Services {
	return Services{runs{plane: p}, manifests{plane: p}, artifacts{plane: p}, ledgers{plane: p}}
}

func (p *plane) GetRun(_ context.Context, r *runv1.GetRunRequest, _ ...grpc.CallOption) (*runv1.GetRunResponse, error) {
	if r.GetRunId() != testRun && r.GetRunId() != "sums" {
		return nil, rpcerr.New(codes.NotFound, "RUN_NOT_FOUND", "run %q does not exist", r.GetRunId())
	}
	cursor := p.cursors[0]
	p.cursors = p.cursors[1:]
	return &runv1.GetRunResponse{Status: &runv1.RunStatus{Run: p.evidence.Run, Cursor: &runv1.Cursor{Position: cursor}}}, nil
}

// ListSnapshots lists one snapshot per page.
func (p *plane) ListSnapshots(_ context.Context, r *snapshotv1.ListSnapshotsRequest, _ ...grpc.CallOption) (*snapshotv1.ListSnapshotsResponse, error) {
	p.pages++
	response := &snapshotv1.ListSnapshotsResponse{NextPageToken: "more"}
	if r.GetPageToken() == "more" {
		response = &snapshotv1.ListSnapshotsResponse{Snapshots: p.evidence.Snapshots}
	}
	return response, nil
}

func (p *plane) GetSnapshot(_ context.Context, r *snapshotv1.GetSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.GetSnapshotResponse, error) {
	if p.deleted || r.GetSnapshotId() != "snap-1" {
		return nil, rpcerr.New(codes.NotFound, "SNAPSHOT_NOT_FOUND", "the snapshot does not exist")
	}
	return &snapshotv1.GetSnapshotResponse{Snapshot: p.evidence.Snapshots[0]}, nil
}

// stream sends messages and then an error; nil is the end.
type stream[T any] struct {
	grpc.ServerStreamingClient[T]
	left []*T
	err  error
}

func (s *stream[T]) Recv() (*T, error) {
	if len(s.left) == 0 {
		if s.err != nil {
			return nil, s.err
		}
		return nil, io.EOF
	}
	next := s.left[0]
	s.left = s.left[1:]
	return next, nil
}

func (p *plane) GetArtifact(_ context.Context, r *storagev1.GetArtifactRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[storagev1.GetArtifactResponse], error) {
	content, ok := p.files[r.GetContentId()]
	if !ok {
		return &stream[storagev1.GetArtifactResponse]{err: rpcerr.New(codes.NotFound, "ARTIFACT_NOT_FOUND", "missing")}, nil
	}
	return &stream[storagev1.GetArtifactResponse]{left: []*storagev1.GetArtifactResponse{{Chunk: []byte(content)}}}, nil
}

func (p *plane) ExportLedger(_ context.Context, r *bufferv1.ExportLedgerRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[bufferv1.ExportLedgerResponse], error) {
	e := p.evidence
	if r.GetRunId() != testRun && r.GetRunId() != external || e.Ledger == nil {
		return &stream[bufferv1.ExportLedgerResponse]{err: rpcerr.New(codes.NotFound, reasonNoLedger, "no ledger")}, nil
	}
	return &stream[bufferv1.ExportLedgerResponse]{left: []*bufferv1.ExportLedgerResponse{
		{Ledger: e.Ledger, Lineages: e.Lineages, Segments: e.Segments, Steps: e.Steps, Weights: e.Weights}, {Groups: e.Groups[:2], Samples: e.Samples[:4]}, {Groups: e.Groups[2:], Samples: e.Samples[4:]},
	}}, nil
}

// served is a plane with an intact run whose snapshot has one file.
func served() *plane {
	p := &plane{evidence: intact(), cursors: []uint64{3, 4}}
	content := id.Content([]byte("state"))
	p.evidence.Snapshots[0].Files[0].Digest = content
	p.files = map[string]string{content: "state"}
	return p
}

func TestGatherReadsARunFromServices(t *testing.T) {
	t.Parallel()
	p := served()
	e, err := Gather(t.Context(), p.services(), "sums", true)
	if err != nil {
		t.Fatal(err)
	}
	if r := report(t, e); !r.Whole || r.Files != (Files{Whole: 1, Bytes: 5}) || e.CursorBefore != 3 || e.CursorAfter != 4 || p.pages != 2 {
		t.Errorf("%+v, cursors %d and %d, %d pages", r, e.CursorBefore, e.CursorAfter, p.pages)
	}
	p = served()
	if e, err = Gather(t.Context(), p.services(), testRun, false); err != nil || e.Files != (Files{}) || len(e.Missing) > 0 {
		t.Errorf("%v, files %+v, missing %v", err, e.Files, e.Missing)
	}
}

func TestGatherReportsFilesOfSnapshots(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spoil            func(*plane)
		missing, corrupt int
	}{
		"missing":                 {func(p *plane) { clear(p.files) }, 1, 0},
		"other content":           {func(p *plane) { p.files[p.evidence.Snapshots[0].Files[0].GetDigest()] = "stat3" }, 0, 1},
		"deleted since it listed": {func(p *plane) { clear(p.files); p.deleted = true }, 0, 0},
	} {
		p := served()
		c.spoil(p)
		e, err := Gather(t.Context(), p.services(), testRun, true)
		if err != nil || len(e.Missing) != c.missing || len(e.Corrupt) != c.corrupt {
			t.Errorf("%s: %v, missing %v, corrupt %v", name, err, e.Missing, e.Corrupt)
		}
	}
}

// The snapshot that a run started from is read too, and may be deleted.
func TestGatherReadsTheOrigin(t *testing.T) {
	t.Parallel()
	for from, want := range map[string]int{"snap-1": 2, "snap-gone": 1} {
		p := served()
		p.evidence.Run.FromSnapshot = from
		e, err := Gather(t.Context(), p.services(), testRun, false)
		if err != nil || len(e.Snapshots) != want {
			t.Errorf("from %s: %v, %d snapshots", from, err, len(e.Snapshots))
		}
	}
}

func TestGatherReadsALedgerWithoutARun(t *testing.T) {
	t.Parallel()
	e, err := Gather(t.Context(), served().services(), external, true)
	if err != nil {
		t.Fatal(err)
	}
	r := report(t, e)
	if !e.Unscheduled || r.RunID != external || r.State != "" || len(r.Skipped) == 0 {
		t.Errorf("%+v", r)
	}
	if kinds := kindsOf(r); !slices.Equal(kinds, []string{"PAYLOAD_FOREIGN"}) { // the samples are those of testRun
		t.Errorf("%v", kinds)
	}
	if _, err := Gather(t.Context(), served().services(), "unknown", true); rpcerr.Reason(err) != "RUN_NOT_FOUND" {
		t.Errorf("%v", err)
	}
	p := served()
	p.evidence.Ledger = nil
	if e, err := Gather(t.Context(), p.services(), testRun, true); err != nil || e.Ledger != nil || e.Unscheduled {
		t.Errorf("a run without a ledger: %v %+v", err, e)
	}
}

// report checks evidence, and closes it.
func report(t *testing.T, e *Evidence) *Report {
	t.Helper()
	r, err := Check(e)
	if err := errors.Join(err, e.Close()); err != nil {
		t.Fatal(err)
	}
	return r
}

func kindsOf(r *Report) (kinds []string) {
	for _, b := range r.Breaks {
		if !slices.Contains(kinds, b.Kind) {
			kinds = append(kinds, b.Kind)
		}
	}
	return kinds
}
