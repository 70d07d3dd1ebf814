package snapshot_test

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/snapshot"
	"github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	"github.com/rollout-rl/rollout/services/snapshot/storetest"
)

// artifacts is a storage service that keeps only digests.
type artifacts struct {
	mu       sync.Mutex
	stored   map[string]bool
	exported []*storagev1.LocalFile
	wrong    bool // returns other content than requested
	down     int  // number of calls that still fail
	onImport func()
	deleted  chan struct{} // receives a value for each deletion; nil: not used
}

func (a *artifacts) call() (func(), error) {
	a.mu.Lock()
	if a.down > 0 {
		a.down--
		a.mu.Unlock()
		return nil, status.Error(codes.Unavailable, "storage is down")
	}
	return a.mu.Unlock, nil
}

func (a *artifacts) ImportArtifacts(_ context.Context, in *storagev1.ImportArtifactsRequest, _ ...grpc.CallOption) (*storagev1.ImportArtifactsResponse, error) {
	done, err := a.call()
	if err != nil {
		return nil, err
	}
	defer done()
	out := &storagev1.ImportArtifactsResponse{}
	for _, f := range in.GetFiles() {
		id := f.GetContentId()
		if a.wrong {
			id = storetest.Digest("f")
		}
		if strings.HasPrefix(f.GetPath(), "/nonexistent/") && !a.stored[id] {
			return nil, rpcerr.New(codes.NotFound, "FILE_NOT_FOUND", "the file does not exist").With("path", f.GetPath())
		}
		a.stored[id] = true
		out.Artifacts = append(out.Artifacts, &storagev1.ArtifactInfo{ContentId: id, Bytes: 10, Exists: true})
	}
	if a.onImport != nil {
		a.onImport()
	}
	return out, nil
}

func (a *artifacts) ExportArtifacts(_ context.Context, in *storagev1.ExportArtifactsRequest, _ ...grpc.CallOption) (*storagev1.ExportArtifactsResponse, error) {
	done, err := a.call()
	if err != nil {
		return nil, err
	}
	defer done()
	a.exported = append(a.exported, in.GetFiles()...)
	return &storagev1.ExportArtifactsResponse{}, nil
}

func (a *artifacts) DeleteArtifacts(_ context.Context, in *storagev1.DeleteArtifactsRequest, _ ...grpc.CallOption) (*storagev1.DeleteArtifactsResponse, error) {
	done, err := a.call()
	if err != nil {
		return nil, err
	}
	defer done()
	for _, id := range in.GetContentIds() {
		delete(a.stored, id)
	}
	if a.deleted != nil {
		a.deleted <- struct{}{}
	}
	return &storagev1.DeleteArtifactsResponse{}, nil
}

func (a *artifacts) GetArtifact(ctx context.Context, in *storagev1.GetArtifactRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[storagev1.GetArtifactResponse], error) {
	return nil, status.Error(codes.Unimplemented, "the test has no bytes")
}

func (a *artifacts) list() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []string
	for id := range maps.Keys(a.stored) {
		out = append(out, id[len("blake3-"):][:1])
	}
	slices.Sort(out)
	return out
}

type scheduler struct {
	created *runv1.CreateRunRequest
	cut     *learnerv1.CutRunRequest
	state   runv1.RunState // of every run
	plan    *planv1.Plan   // of every run; nil: one with a name
}

func (s *scheduler) GetRun(_ context.Context, in *runv1.GetRunRequest, _ ...grpc.CallOption) (*runv1.GetRunResponse, error) {
	name := "origin"
	plan := cmp.Or(s.plan, &planv1.Plan{Format: 2, Config: &configv1.RunConfig{Name: &name}})
	return &runv1.GetRunResponse{Status: &runv1.RunStatus{Run: &runv1.Run{RunId: in.GetRunId(), Plan: plan, BaseDir: "/data", State: s.state}}}, nil
}

func (s *scheduler) CreateRun(_ context.Context, in *runv1.CreateRunRequest, _ ...grpc.CallOption) (*runv1.CreateRunResponse, error) {
	s.created = in
	return &runv1.CreateRunResponse{Run: &runv1.Run{RunId: "run-new"}}, nil
}

func (s *scheduler) CutRun(_ context.Context, in *learnerv1.CutRunRequest, _ ...grpc.CallOption) (*learnerv1.CutRunResponse, error) {
	s.cut = in
	return &learnerv1.CutRunResponse{}, nil
}

// ledgers is a buffer with one ledger.
type ledgers struct{ parts []*bufferv1.CutLedgerResponse }

func (l *ledgers) CutLedger(ctx context.Context, _ *bufferv1.CutLedgerRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[bufferv1.CutLedgerResponse], error) {
	return &parts[bufferv1.CutLedgerResponse]{left: l.parts}, nil
}

// parts is a stream of messages.
type parts[T any] struct {
	grpc.ClientStream
	left []*T
}

func (p *parts[T]) Recv() (*T, error) {
	if len(p.left) == 0 {
		return nil, io.EOF
	}
	first := p.left[0]
	p.left = p.left[1:]
	return first, nil
}

type events chan *eventv1.Event

func (e events) Emit(event *eventv1.Event) { e <- event }

type world struct {
	*snapshot.Server
	store     snapshot.Store
	artifacts *artifacts
	scheduler *scheduler
	ledgers   *ledgers
	processes *processes
	events    events
}

// setup makes a service. bucket: where its manifests are too, at most one.
func setup(t *testing.T, bucket ...blob.Store) *world {
	t.Helper()
	store, err := sqlstore.Open(t.Context(), sqldb.Files(t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	w := &world{store: store, artifacts: &artifacts{stored: map[string]bool{}}, ledgers: &ledgers{}, processes: &processes{}, scheduler: &scheduler{state: runv1.RunState_RUN_STATE_SUCCEEDED}, events: make(events, 100)}
	clock := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	deps := snapshot.Deps{
		Store: store, Artifacts: w.artifacts, Scheduler: w.scheduler, Buffer: w.ledgers, Controller: w.scheduler, Processes: w.processes, Events: w.events,
		Projects: apikey.NewProjects(func(_ context.Context, run string) (string, error) {
			if run != "run-a" {
				return "", apikey.ErrNotVisible
			}
			return "math", nil
		}),
		Now: func() time.Time { clock = clock.Add(time.Second); return clock },
	}
	for _, b := range bucket {
		deps.Bucket = b
	}
	if w.Server, err = snapshot.New(snapshot.Config{}, deps); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) take(t *testing.T, step uint64, keep uint32, contents ...string) *snapshot.Snapshot {
	t.Helper()
	snap := storetest.Snap("", "run-a", step, contents...)
	snap.WeightsDigest = storetest.Digest("e")
	resp, err := w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: snap, Directory: "/scratch", Keep: keep})
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetSnapshot()
}

func TestCreateRecordsAndEmitsAnEvent(t *testing.T) {
	t.Parallel()
	w := setup(t)
	snap := w.take(t, 3, 0, "a", "b")
	if !strings.HasPrefix(snap.GetSnapshotId(), "snap-") || snap.GetBytes() != 20 || snap.GetFiles()[1].GetBytes() != 10 {
		t.Fatalf("manifest %v", snap)
	}
	e := <-w.events
	if e.GetKind() != "snapshot.created" || e.GetAttributes()["snapshot"] != snap.GetSnapshotId() ||
		e.GetAttributes()["digest"] != snap.GetWeightsDigest() || e.GetMetrics()["bytes"] != 20 || e.GetStep() != 3 {
		t.Fatalf("event %v", e)
	}
	again := w.take(t, 3, 0, "a", "b")
	if again.GetSnapshotId() != snap.GetSnapshotId() || len(w.events) != 0 {
		t.Fatalf("a repeated call returned %v", again)
	}
}

func TestOtherContentOfAKeyIsAConflict(t *testing.T) {
	t.Parallel()
	w := setup(t)
	first := w.take(t, 3, 0, "a")
	other := storetest.Snap("", "run-a", 3, "b")
	create := func() (*snapshot.Snapshot, error) {
		resp, err := w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: other, Directory: "/scratch", Keep: 1})
		return resp.GetSnapshot(), err
	}
	_, err := create()
	if e, _ := rpcerr.From(err); !errors.Is(err, snapshot.ErrConflict) || e.Metadata()["snapshot"] != first.GetSnapshotId() {
		t.Fatalf("got %v", err)
	}
	if got := w.artifacts.list(); !slices.Equal(got, []string{"a"}) {
		t.Fatalf("storage has %v", got)
	}
	other.Name = "best"
	named, err := create()
	if err != nil || named.GetName() != "best" || named.GetSnapshotId() == first.GetSnapshotId() {
		t.Fatalf("created %v, %v", named, err)
	}
	if got := w.artifacts.list(); !slices.Equal(got, []string{"a", "b"}) { // each name has its own retention
		t.Fatalf("storage has %v", got)
	}
}

func TestRetentionDeletesFilesWithoutAManifest(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.take(t, 1, 2, "a", "b")
	w.take(t, 2, 2, "b", "c")
	w.take(t, 3, 2, "c", "d")
	if got := w.artifacts.list(); !slices.Equal(got, []string{"b", "c", "d"}) {
		t.Fatalf("storage has %v", got)
	}
	list, err := w.ListSnapshots(t.Context(), &snapshotv1.ListSnapshotsRequest{RunId: "run-a"})
	if err != nil || len(list.GetSnapshots()) != 2 || list.GetSnapshots()[0].GetStep() != 3 {
		t.Fatalf("list %v, %v", list, err)
	}
}

func TestRetentionKeepsPinnedSnapshots(t *testing.T) {
	t.Parallel()
	w := setup(t)
	first := w.take(t, 1, 1, "a")
	pinned, err := w.PinSnapshot(t.Context(), &snapshotv1.PinSnapshotRequest{SnapshotId: first.GetSnapshotId()[:12]}) // as the scheduler does
	if err != nil || pinned.GetSnapshot().GetSnapshotId() != first.GetSnapshotId() {
		t.Fatalf("pinned %v, %v", pinned, err)
	}
	resp, err := w.RestoreSnapshot(t.Context(), &snapshotv1.RestoreSnapshotRequest{SnapshotId: first.GetSnapshotId()[:12]})
	if err != nil || resp.GetRun().GetRunId() != "run-new" {
		t.Fatalf("restored %v, %v", resp, err)
	}
	got := w.scheduler.created
	if got.GetFromSnapshot() != first.GetSnapshotId() || got.GetBaseDir() != "/data" || string(got.GetLock()) != `{"config":{"name":"origin"},"format":2}` {
		t.Fatalf("asked for %v", got)
	}
	w.take(t, 2, 1, "b")
	w.take(t, 3, 1, "c")
	if got := w.artifacts.list(); !slices.Equal(got, []string{"a", "c"}) {
		t.Fatalf("storage has %v", got)
	}
}

func TestAnImportedSnapshotIsRestoredWithItsOwnPlan(t *testing.T) {
	t.Parallel()
	w := setup(t)
	imported := storetest.Snap("", "run-elsewhere", 1, "a")
	imported.Origin = &snapshotv1.Origin{Plan: &planv1.Plan{Format: 2}, BaseDir: "/imported"}
	first, err := w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: imported, Directory: "/scratch"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.RestoreSnapshot(t.Context(), &snapshotv1.RestoreSnapshotRequest{SnapshotId: first.GetSnapshot().GetSnapshotId()}); err != nil {
		t.Fatal(err)
	}
	if got := w.scheduler.created; got.GetBaseDir() != "/imported" || string(got.GetLock()) != `{"format":2}` {
		t.Errorf("asked for %v", got)
	}
	imported.Origin.BaseDir = "/elsewhere"
	again, err := w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: imported, Directory: "/scratch"})
	if err != nil || again.GetSnapshot().GetSnapshotId() != first.GetSnapshot().GetSnapshotId() {
		t.Errorf("imported twice: %v, %v", again, err)
	}
}

func TestAKindWithoutAHandlerIsRefused(t *testing.T) {
	t.Parallel()
	w := setup(t)
	stored := storetest.Snap("snap-1", "run-a", 1, "a") // like another version of the service wrote it
	const later = snapshotv1.SnapshotKind(99)
	stored.Kind = later
	if _, err := w.store.Record(t.Context(), stored, nil); err != nil {
		t.Fatal(err)
	}
	made := storetest.Snap("", "run-a", 1, "a")
	made.Kind = later
	_, create := w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: made, Directory: "/scratch"})
	_, list := w.ListSnapshots(t.Context(), &snapshotv1.ListSnapshotsRequest{Kind: later})
	_, restore := w.RestoreSnapshot(t.Context(), &snapshotv1.RestoreSnapshotRequest{SnapshotId: "snap-1"})
	for kind, err := range map[string]error{"99": errors.Join(create, list, restore)} {
		e, _ := rpcerr.From(err)
		if !errors.Is(err, snapshot.ErrUnsupported) || e.Metadata()["kind"] != kind || e.Metadata()["supported"] != "train_state, buffer, process, episodic" {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if len(w.artifacts.list()) != 0 || w.scheduler.created != nil {
		t.Errorf("storage has %v, run %v was created", w.artifacts.list(), w.scheduler.created)
	}
}

func TestMaterializeExportsEachFile(t *testing.T) {
	t.Parallel()
	w := setup(t)
	snap := w.take(t, 1, 0, "a", "b")
	if _, err := w.MaterializeSnapshot(t.Context(), &snapshotv1.MaterializeSnapshotRequest{SnapshotId: snap.GetSnapshotId(), Directory: "/to"}); err != nil {
		t.Fatal(err)
	}
	if e := w.artifacts.exported; len(e) != 2 || e[1].GetPath() != "/to/f1" || e[1].GetContentId() != storetest.Digest("b") {
		t.Fatalf("exported %v", e)
	}
	_, err := w.MaterializeSnapshot(t.Context(), &snapshotv1.MaterializeSnapshotRequest{SnapshotId: "snap-x", Directory: "/to"})
	if !errors.Is(err, snapshot.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
}

func TestMaterializeExportsTheWantedFiles(t *testing.T) {
	t.Parallel()
	w := setup(t)
	snap := w.take(t, 1, 0, "a", "b")
	materialize := func(paths ...string) error {
		_, err := w.MaterializeSnapshot(t.Context(), &snapshotv1.MaterializeSnapshotRequest{SnapshotId: snap.GetSnapshotId(), Directory: "/to", Paths: paths})
		return err
	}
	if err := materialize("f1"); err != nil {
		t.Fatal(err)
	}
	if e := w.artifacts.exported; len(e) != 1 || e[0].GetPath() != "/to/f1" {
		t.Fatalf("exported %v", e)
	}
	if err := materialize("f7"); !errors.Is(err, snapshot.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
}

// Many snapshots share the model that their adapters belong to.
func TestTheSizeOmitsTheBase(t *testing.T) {
	t.Parallel()
	w := setup(t)
	made := storetest.Snap("", "run-a", 1, "a", "b")
	made.Files[1].Path = "base/model.safetensors"
	got, err := w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: made, Directory: "/scratch"})
	if err != nil {
		t.Fatal(err)
	}
	files := got.GetSnapshot().GetFiles()
	if files[1].GetBytes() == 0 || got.GetSnapshot().GetBytes() != files[0].GetBytes() {
		t.Errorf("%d bytes: %v", got.GetSnapshot().GetBytes(), files)
	}
}

func TestDeleteIsIdempotent(t *testing.T) {
	t.Parallel()
	w := setup(t)
	id := w.take(t, 1, 0, "a").GetSnapshotId()
	for range 2 {
		if _, err := w.DeleteSnapshot(t.Context(), &snapshotv1.DeleteSnapshotRequest{SnapshotId: id}); err != nil {
			t.Fatal(err)
		}
	}
	if got := w.artifacts.list(); len(got) != 0 {
		t.Fatalf("storage has %v", got)
	}
}

// Files of an import without a manifest are deleted at the next start, however often storage fails
// before.
func TestStartSweepsWhatACrashLeft(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.take(t, 1, 0, "a")
	crashed, crash := context.WithCancel(t.Context())
	w.artifacts.onImport = crash // the store then refuses the manifest
	snap := storetest.Snap("", "run-a", 2, "a", "b")
	if _, err := w.CreateSnapshot(crashed, &snapshotv1.CreateSnapshotRequest{Snapshot: snap, Directory: "/scratch"}); err == nil {
		t.Fatal("the snapshot was recorded")
	}
	if got := w.artifacts.list(); !slices.Equal(got, []string{"a", "b"}) {
		t.Fatalf("before the start: %v", got)
	}
	w.artifacts.down, w.artifacts.deleted = 2, make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ran := make(chan error, 1)
	go func() { ran <- w.Run(ctx) }()
	<-w.artifacts.deleted
	if got := w.artifacts.list(); !slices.Equal(got, []string{"a"}) {
		t.Fatalf("after the start: %v", got)
	}
	cancel()
	if err := <-ran; err != nil {
		t.Fatal(err)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	w := setup(t)
	bad := storetest.Snap("", "", 1, "a")
	bad.Files[0].Path = "../escape"
	_, err := w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: bad, Directory: "relative"})
	if e, _ := rpcerr.From(err); !errors.Is(err, snapshot.ErrInvalid) || len(e.Violations()) != 3 {
		t.Fatalf("got %v", err)
	}
	w.artifacts.wrong = true
	_, err = w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: storetest.Snap("", "run-a", 1, "a"), Directory: "/scratch"})
	if !errors.Is(err, snapshot.ErrMismatch) {
		t.Fatalf("other content was taken: %v", err)
	}
	if _, err := snapshot.New(snapshot.Config{}, snapshot.Deps{}); err == nil {
		t.Fatal("a service of nothing was made")
	}
}

func TestPages(t *testing.T) {
	t.Parallel()
	w := setup(t)
	for step := range uint64(5) {
		w.take(t, step+1, 0, "a")
	}
	var steps []uint64
	token := ""
	for {
		page, err := w.ListSnapshots(t.Context(), &snapshotv1.ListSnapshotsRequest{PageSize: 2, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range page.GetSnapshots() {
			steps = append(steps, s.GetStep())
		}
		if token = page.GetNextPageToken(); token == "" {
			break
		}
	}
	if !slices.Equal(steps, []uint64{5, 4, 3, 2, 1}) {
		t.Fatalf("steps %v", steps)
	}
	for _, token := range []string{"2", "snap-x", "run-01kapq3n8jz3gq5p1cs0e8q0vd"} {
		_, err := w.ListSnapshots(t.Context(), &snapshotv1.ListSnapshotsRequest{PageToken: token})
		e, _ := rpcerr.From(err)
		if rpcerr.Code(err) != codes.InvalidArgument || len(e.Violations()) != 1 || e.Violations()[0].Path != "page_token" {
			t.Errorf("the page token %q: %v", token, err)
		}
	}
}

func TestDeleteRunKeepsWhatIsNeeded(t *testing.T) {
	t.Parallel()
	w := setup(t)
	kept := w.take(t, 1, 0, "a", "b")
	w.take(t, 2, 0, "b", "c")
	pinned := w.take(t, 3, 0, "d") // by a run that was not created
	for _, snap := range []*snapshot.Snapshot{kept, pinned} {
		if _, err := w.PinSnapshot(t.Context(), &snapshotv1.PinSnapshotRequest{SnapshotId: snap.GetSnapshotId()}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := w.DeleteRun(t.Context(), &snapshotv1.DeleteRunRequest{RunId: "run-a", Keep: []string{kept.GetSnapshotId(), "snap-other"}})
	if err != nil || !slices.Equal(got.GetKept(), []string{kept.GetSnapshotId()}) || !slices.Equal(w.artifacts.list(), []string{"a", "b"}) {
		t.Fatalf("%v, %v, storage has %v", got, err, w.artifacts.list())
	}
	stays, err := w.GetSnapshot(t.Context(), &snapshotv1.GetSnapshotRequest{SnapshotId: kept.GetSnapshotId()})
	if of := stays.GetSnapshot().GetOrigin(); err != nil || !of.GetDeleted() || of.GetBaseDir() != "/data" || of.GetPlan().GetConfig().GetName() != "origin" {
		t.Errorf("a snapshot that stays cannot be restored: %v, %v", of, err)
	}
	imported := storetest.Snap("", "run-elsewhere", 5, "e")
	imported.Origin = stays.GetSnapshot().GetOrigin()
	taken, err := w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: imported, Directory: "/scratch"})
	if err != nil || taken.GetSnapshot().GetOrigin().GetDeleted() {
		t.Errorf("an import says that its run was deleted here: %v, %v", taken, err)
	}
	if _, err := w.DeleteSnapshot(t.Context(), &snapshotv1.DeleteSnapshotRequest{SnapshotId: taken.GetSnapshot().GetSnapshotId()}); err != nil {
		t.Error(err)
	}
	if got, err = w.DeleteRun(t.Context(), &snapshotv1.DeleteRunRequest{RunId: "run-a"}); err != nil || len(got.GetKept())+len(w.artifacts.list()) > 0 {
		t.Errorf("%v, %v, storage has %v", got, err, w.artifacts.list())
	}
}

// An active run recovers from its newest snapshot.
func TestNewestSnapshotOfAnActiveRunIsNotDeleted(t *testing.T) {
	t.Parallel()
	w := setup(t)
	old, newest := w.take(t, 1, 0, "a"), w.take(t, 2, 0, "b")
	w.scheduler.state = runv1.RunState_RUN_STATE_RUNNING
	remove := func(snap *snapshot.Snapshot) error {
		_, err := w.DeleteSnapshot(t.Context(), &snapshotv1.DeleteSnapshotRequest{SnapshotId: snap.GetSnapshotId()})
		return err
	}
	if err := remove(newest); !errors.Is(err, snapshot.ErrInUse) {
		t.Errorf("the newest: %v", err)
	}
	if err := remove(old); err != nil {
		t.Errorf("the older one: %v", err)
	}
	for _, kind := range []snapshotv1.SnapshotKind{snapshotv1.SnapshotKind_SNAPSHOT_KIND_BUFFER, snapshotv1.SnapshotKind_SNAPSHOT_KIND_EPISODIC} {
		snap := storetest.Snap("snap-"+kind.String(), "run-a", 3, "c") // no recovery needs it
		snap.Kind = kind
		if _, err := w.store.Record(t.Context(), snap, nil); err != nil {
			t.Fatal(err)
		}
		if err := remove(snap); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
	w.scheduler.state = runv1.RunState_RUN_STATE_SUCCEEDED
	if err := remove(newest); err != nil {
		t.Errorf("of an ended run: %v", err)
	}
}

// A key sees, lists, and deletes the snapshots of its project only: of its runs, and those that it
// imported.
func TestAKeySeesTheSnapshotsOfItsProject(t *testing.T) {
	t.Parallel()
	w := setup(t)
	as := func(project string) context.Context {
		return apikey.With(t.Context(), &apikey.Record{Name: "key", Scope: "admin", Project: project})
	}
	own := w.take(t, 3, 0, "a") // of run-a, which belongs to math
	imported := storetest.Snap("", "run-elsewhere", 5, "b")
	imported.Origin = &snapshotv1.Origin{BaseDir: "/data", Project: "code"}
	got, err := w.CreateSnapshot(as("bio"), &snapshotv1.CreateSnapshotRequest{Snapshot: imported, Directory: "/scratch"})
	if err != nil {
		t.Fatal(err)
	}
	for project, want := range map[string]string{"math": own.GetSnapshotId(), "bio": got.GetSnapshot().GetSnapshotId(), "code": ""} {
		list, err := w.ListSnapshots(as(project), &snapshotv1.ListSnapshotsRequest{PageSize: 1})
		if err != nil {
			t.Fatal(err)
		}
		seen := ""
		for _, snap := range list.GetSnapshots() {
			seen += snap.GetSnapshotId()
		}
		if seen != want {
			t.Errorf("%s lists %q, want %q", project, seen, want)
		}
		for _, id := range []string{own.GetSnapshotId(), got.GetSnapshot().GetSnapshotId()} {
			if _, err := w.GetSnapshot(as(project), &snapshotv1.GetSnapshotRequest{SnapshotId: id}); (err == nil) != (id == want) || err != nil && !errors.Is(err, snapshot.ErrNotFound) {
				t.Errorf("%s gets %s: %v", project, id, err)
			}
		}
	}
	other := storetest.Snap("", "run-a", 7, "c")
	if _, err := w.CreateSnapshot(as("bio"), &snapshotv1.CreateSnapshotRequest{Snapshot: other, Directory: "/scratch"}); !errors.Is(err, apikey.ErrNotVisible) {
		t.Errorf("a snapshot of another project's run: %v", err)
	}
	if _, err := w.DeleteSnapshot(as("bio"), &snapshotv1.DeleteSnapshotRequest{SnapshotId: own.GetSnapshotId()}); err != nil {
		t.Error(err)
	}
	if _, err := w.GetSnapshot(t.Context(), &snapshotv1.GetSnapshotRequest{SnapshotId: own.GetSnapshotId()}); err != nil {
		t.Errorf("another project deleted a snapshot: %v", err)
	}
}

// The episodes of a snapshot are visible to its project only, by its id and by a prefix of it.
func TestAKeySeesTheEpisodesOfItsProject(t *testing.T) {
	t.Parallel()
	w := setup(t)
	episodic := storetest.Snap("snap-1", "run-a", 3, "a")
	episodic.Kind = snapshot.Episodic
	episodic.Files = append(episodic.Files, &snapshotv1.SnapshotFile{Path: "episodes/open.binpb", Digest: storetest.Digest("b")})
	if _, err := w.store.Record(t.Context(), episodic, nil); err != nil {
		t.Fatal(err)
	}
	for project, want := range map[string]codes.Code{"math": codes.Unimplemented, "bio": codes.NotFound} { // the test has no bytes
		ctx := apikey.With(t.Context(), &apikey.Record{Name: "key", Scope: "read", Project: project})
		for _, id := range []string{"snap-1", "snap-"} {
			_, err := w.ListEpisodes(ctx, &snapshotv1.ListEpisodesRequest{SnapshotId: id})
			if rpcerr.Code(err) != want {
				t.Errorf("%s lists the episodes of %s: %v, want %s", project, id, err, want)
			}
		}
	}
}

// A snapshot of episodes that an environment does not save is refused before the run is disturbed.
func TestEpisodesThatAreNotSavedAreRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ kind, path, message, fix string }{
		"class": {
			"python", "guess.py:Guess", "the environment guess.py:Guess of run-a saves no episodes, so that a snapshot of kind episodic would contain none",
			"define `state_dict(self)` and `load_state_dict(self, state)` in its `SingleEpisode`, and start the run again with a new plan; or take one of kind buffer: `rollout snapshot create run-a --kind buffer`",
		},
		"external": {
			"external", "", "the environment external of run-a saves no episodes, so that a snapshot of kind episodic would contain none",
			"take one of kind buffer: `rollout snapshot create run-a --kind buffer`",
		},
		"none": {
			"", "", "the environment single_turn of run-a saves no episodes, so that a snapshot of kind episodic would contain none",
			"take one of kind buffer: `rollout snapshot create run-a --kind buffer`",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := setup(t)
			environment := &configv1.EnvironmentConfig{}
			if c.kind != "" {
				environment.Kind = &c.kind
			}
			if c.path != "" {
				environment.Path = &c.path
			}
			w.scheduler.state = runv1.RunState_RUN_STATE_RUNNING
			w.scheduler.plan = &planv1.Plan{Config: &configv1.RunConfig{Environment: environment}}
			request := &snapshotv1.TakeSnapshotsRequest{RunId: "run-a", Kinds: []snapshot.Kind{snapshot.Buffer, snapshot.Episodic}}
			_, err := w.TakeSnapshots(t.Context(), request)
			e, _ := rpcerr.From(err)
			if rpcerr.Reason(err) != "EPISODES_NOT_SAVED" || rpcerr.Code(err) != codes.FailedPrecondition || err.Error() != c.message || e.Metadata()["fix"] != c.fix {
				t.Errorf("%v; fix: %v", err, e)
			}
			if w.scheduler.cut != nil {
				t.Error("a cut was taken")
			}
			w.scheduler.plan.SavesEpisodes = true
			if _, err := w.TakeSnapshots(t.Context(), request); err != nil || w.scheduler.cut == nil {
				t.Errorf("with episodes: %v", err)
			}
		})
	}
}

// A snapshot of a run that commits no step is refused at once, with what to do in its state.
func TestTakeRefusesARunThatCommitsNoStep(t *testing.T) {
	t.Parallel()
	for state, want := range map[runv1.RunState]string{
		runv1.RunState_RUN_STATE_RUNNING:     "",
		runv1.RunState_RUN_STATE_PAUSED:      "run-a is PAUSED: snapshots are taken when a step is committed; fix: rollout runs resume run-a",
		runv1.RunState_RUN_STATE_FAILED:      "run-a is FAILED: snapshots are taken when a step is committed; fix: `rollout run --resume run-a` continues it; `rollout snapshot list run-a` shows its training states",
		runv1.RunState_RUN_STATE_INTERRUPTED: "run-a is INTERRUPTED: snapshots are taken when a step is committed; fix: `rollout run --resume run-a` continues it; `rollout snapshot list run-a` shows its training states",
		runv1.RunState_RUN_STATE_SUCCEEDED:   "run-a has SUCCEEDED: it commits no further step; fix: `rollout snapshot list run-a` shows its training states; `rollout run --config FILE --from SNAPSHOT --continue` trains one further",
	} {
		w := setup(t)
		w.scheduler.state = state
		_, err := w.TakeSnapshots(t.Context(), &snapshotv1.TakeSnapshotsRequest{RunId: "run-a", Kinds: []snapshot.Kind{snapshot.Buffer}})
		got := ""
		if err != nil {
			got = err.Error() + "; fix: " + rpcerr.Fix(err)
		}
		if got != want || err != nil && rpcerr.Reason(err) != "RUN_NOT_TRAINING" || (w.scheduler.cut == nil) != (err != nil) {
			t.Errorf("%v: %s", state, got)
		}
	}
}
