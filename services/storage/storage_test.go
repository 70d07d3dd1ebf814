package storage_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/files"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/storage"
	"github.com/rollout-rl/rollout/services/storage/sqlstore"
)

type setup struct {
	artifacts storagev1.ArtifactServiceClient
	events    storagev1.EventServiceClient
	bus       *bus.Bus
	blobs     string
}

// serve runs the service on an embedded NATS server, and returns clients.
func serve(t *testing.T) setup {
	t.Helper()
	dir := t.TempDir()
	nats, err := bus.StartEmbedded(filepath.Join(dir, "nats"), bus.EmbeddedOptions{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nats.Stop)
	b, err := bus.Connect(t.Context(), bus.Options{URL: nats.URL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	store, err := sqlstore.Open(t.Context(), sqldb.Files(dir))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	blobs := filepath.Join(dir, "artifacts")
	adapter, err := files.Open(blobs)
	if err != nil {
		t.Fatal(err)
	}
	s, err := storage.New(storage.Config{Page: 2, TrimEvery: time.Millisecond}, storage.Deps{Store: store, Artifacts: blob.NewCAS(adapter, dir), Stream: b})
	if err != nil {
		t.Fatal(err)
	}
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer(grpc.UnaryInterceptor(rpcerr.Unary(nil)), grpc.StreamInterceptor(rpcerr.Stream(nil)))
	s.Register(server)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	conn, err := grpc.NewClient("passthrough:///storage", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return setup{storagev1.NewArtifactServiceClient(conn), storagev1.NewEventServiceClient(conn), b, blobs}
}

func event(n string) *eventv1.Event {
	return &eventv1.Event{EventId: n, RunId: "run-a", Time: timestamppb.New(time.Unix(1, 0)), Service: "buffer", Kind: "log", Message: n}
}

func TestTailSendsStoredEventsThenNewOnes(t *testing.T) {
	t.Parallel()
	s := serve(t)
	if _, err := s.events.AppendEvents(t.Context(), &storagev1.AppendEventsRequest{Events: []*eventv1.Event{event("1"), event("2"), event("3")}}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	tail, err := s.events.TailEvents(ctx, &storagev1.TailEventsRequest{Filter: &storagev1.EventFilter{RunId: "run-a"}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	read := func(until string) {
		t.Helper()
		for len(got) == 0 || got[len(got)-1] != until {
			resp, err := tail.Recv()
			if err != nil {
				t.Fatalf("after %v: %v", got, err)
			}
			for _, e := range resp.GetEvents() {
				got = append(got, e.GetMessage())
			}
		}
	}
	read("3")
	if err := s.bus.EnsureEvents(ctx); err != nil {
		t.Fatal(err)
	}
	// A worker of run-b may publish on the subject of its run alone, and says nothing of another run.
	if err := s.bus.PublishProto(ctx, bus.EventSubject("run-b"), &eventv1.EventBatch{Events: []*eventv1.Event{event("forged")}}); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"3", "4", "5"} { // 3 is sent a second time and skipped
		if err := s.bus.PublishProto(ctx, bus.EventSubject("run-a"), &eventv1.EventBatch{Events: []*eventv1.Event{event(n)}}); err != nil {
			t.Fatal(err)
		}
	}
	read("5")
	if len(got) != 5 {
		t.Fatalf("got %v", got)
	}
}

func TestStoredEventsLeaveTheStream(t *testing.T) {
	t.Parallel()
	s := serve(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if err := s.bus.EnsureEvents(ctx); err != nil {
		t.Fatal(err)
	}
	for n := range 20 {
		if err := s.bus.PublishProto(ctx, bus.EventSubject("run-a"), &eventv1.EventBatch{Events: []*eventv1.Event{event(strconv.Itoa(n))}}); err != nil {
			t.Fatal(err)
		}
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		stream, err := s.bus.JetStream().Stream(ctx, names.EventStream)
		if err != nil {
			t.Fatal(err)
		}
		if stream.CachedInfo().State.Msgs == 0 {
			break
		}
		<-tick.C
	}
	listed, err := s.events.ListEvents(ctx, &storagev1.ListEventsRequest{})
	if err != nil || len(listed.GetEvents()) != 20 {
		t.Errorf("%d events are stored, %v", len(listed.GetEvents()), err)
	}
}

func TestArtifactsAreStoredReadAndDeleted(t *testing.T) {
	t.Parallel()
	s := serve(t)
	data := bytes.Repeat([]byte("0123456789"), 250_000)
	put, err := s.artifacts.PutArtifact(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for rest := data; len(rest) > 0; rest = rest[min(len(rest), 1<<20):] {
		if err := put.Send(&storagev1.PutArtifactRequest{Chunk: rest[:min(len(rest), 1<<20)]}); err != nil {
			t.Fatal(err)
		}
	}
	stored, err := put.CloseAndRecv()
	if err != nil || stored.GetContentId() != id.Content(data) || stored.GetBytes() != uint64(len(data)) {
		t.Fatalf("got %v, %v", stored, err)
	}
	if got, err := read(t, s, stored.GetContentId()); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("read %d bytes, %v", len(got), err)
	}
	for _, offset := range []int{1, len(data) - 1, len(data)} { // an interrupted transfer resumes
		if got, err := readFrom(t, s, stored.GetContentId(), uint64(offset)); err != nil || !bytes.Equal(got, data[offset:]) {
			t.Fatalf("read %d bytes from %d, %v", len(got), offset, err)
		}
	}
	if _, err := readFrom(t, s, stored.GetContentId(), uint64(len(data)+1)); rpcerr.Code(err) != codes.OutOfRange {
		t.Fatalf("got %v", err)
	}
	absent := id.Content([]byte("absent"))
	stat, err := s.artifacts.StatArtifacts(t.Context(), &storagev1.StatArtifactsRequest{ContentIds: []string{stored.GetContentId(), absent}})
	if err != nil || !stat.GetArtifacts()[0].GetExists() || stat.GetArtifacts()[1].GetExists() {
		t.Fatalf("got %v, %v", stat, err)
	}
	for range 2 {
		if _, err := s.artifacts.DeleteArtifacts(t.Context(), &storagev1.DeleteArtifactsRequest{ContentIds: []string{stored.GetContentId()}, Fence: fencetest.Scheduler(0, 1)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := read(t, s, stored.GetContentId()); rpcerr.Reason(err) != "ARTIFACT_NOT_FOUND" {
		t.Fatalf("got %v", err)
	}
}

func read(t *testing.T, s setup, content string) ([]byte, error) {
	t.Helper()
	return readFrom(t, s, content, 0)
}

func readFrom(t *testing.T, s setup, content string, offset uint64) ([]byte, error) {
	t.Helper()
	get, err := s.artifacts.GetArtifact(t.Context(), &storagev1.GetArtifactRequest{ContentId: content, Offset: offset})
	if err != nil {
		return nil, err
	}
	var all []byte
	for {
		resp, err := get.Recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, resp.GetChunk()...)
	}
}

func TestImportAndExport(t *testing.T) {
	t.Parallel()
	s := serve(t)
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "deep", "to")
	if err := os.WriteFile(from, []byte("weights"), 0o600); err != nil {
		t.Fatal(err)
	}
	content := id.Content([]byte("weights"))
	imported, err := s.artifacts.ImportArtifacts(t.Context(), &storagev1.ImportArtifactsRequest{Files: []*storagev1.LocalFile{{Path: from, ContentId: content}}})
	if err != nil || imported.GetArtifacts()[0].GetContentId() != content {
		t.Fatalf("got %v, %v", imported, err)
	}
	if err := os.Remove(from); err != nil {
		t.Fatal(err)
	}
	again, err := s.artifacts.ImportArtifacts(t.Context(), &storagev1.ImportArtifactsRequest{Files: []*storagev1.LocalFile{{Path: from, ContentId: content}}})
	if err != nil || again.GetArtifacts()[0].GetContentId() != content || again.GetArtifacts()[0].GetBytes() != 7 {
		t.Fatalf("a stored file that is gone: got %v, %v", again, err)
	}
	export := &storagev1.ExportArtifactsRequest{Files: []*storagev1.LocalFile{{Path: to, ContentId: content}}}
	for range 2 {
		if _, err := s.artifacts.ExportArtifacts(t.Context(), export); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(to); err != nil || string(got) != "weights" {
		t.Fatalf("exported %q, %v", got, err)
	}
	private := filepath.Join(dir, "private", "to")
	request := &storagev1.ExportArtifactsRequest{Files: []*storagev1.LocalFile{{Path: private, ContentId: content, Private: true}}}
	if _, err := s.artifacts.ExportArtifacts(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{to: 0o644, private: 0o600, filepath.Dir(private): 0o700} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: mode %v, %v, want %v", path, info.Mode().Perm(), err, want)
		}
	}
	if err := filepath.WalkDir(s.blobs, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if err := os.Chmod(path, 0o600); err != nil {
			return err
		}
		return os.WriteFile(path, []byte("Weights"), 0o600)
	}); err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]struct {
		err    error
		reason string
	}{
		"corrupt on disk": {func() error { _, err := s.artifacts.ExportArtifacts(t.Context(), export); return err }(), "ARTIFACT_CORRUPT"},
		"another content": {func() error {
			_, err := s.artifacts.ImportArtifacts(t.Context(), &storagev1.ImportArtifactsRequest{Files: []*storagev1.LocalFile{{Path: to, ContentId: id.Content(nil)}}})
			return err
		}(), "ARTIFACT_MISMATCH"},
		"no such file": {func() error {
			_, err := s.artifacts.ImportArtifacts(t.Context(), &storagev1.ImportArtifactsRequest{Files: []*storagev1.LocalFile{{Path: from}}})
			return err
		}(), "FILE_NOT_FOUND"},
		"neither file nor artifact": {func() error {
			_, err := s.artifacts.ImportArtifacts(t.Context(), &storagev1.ImportArtifactsRequest{Files: []*storagev1.LocalFile{{Path: from, ContentId: id.Content([]byte("other"))}}})
			return err
		}(), "FILE_NOT_FOUND"},
		"relative path": {func() error {
			_, err := s.artifacts.ImportArtifacts(t.Context(), &storagev1.ImportArtifactsRequest{Files: []*storagev1.LocalFile{{Path: "from"}}})
			return err
		}(), "BAD_PATH"},
	} {
		if rpcerr.Reason(call.err) != call.reason {
			t.Errorf("%s: got %v, want %s", name, call.err, call.reason)
		}
	}
}

// put stores an artifact for a run.
func put(t *testing.T, s setup, run, data string) string {
	t.Helper()
	stream, err := s.artifacts.PutArtifact(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for n, chunk := range []string{data[:1], data[1:]} {
		if n > 0 {
			run = "" // only the first message names it
		}
		if err := stream.Send(&storagev1.PutArtifactRequest{Chunk: []byte(chunk), RunId: run}); err != nil {
			t.Fatal(err)
		}
	}
	stored, err := stream.CloseAndRecv()
	if err != nil {
		t.Fatal(err)
	}
	return stored.GetContentId()
}

// An artifact is deleted with the last run that stored it, and a snapshot's file with no run.
func TestArtifactsAreDeletedWithTheirRuns(t *testing.T) {
	t.Parallel()
	s := serve(t)
	by := fencetest.Scheduler(0, 1)
	own, shared := put(t, s, "run-a", "own"), put(t, s, "run-a", "shared")
	put(t, s, "run-b", "shared")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("of a snapshot"), 0o600); err != nil {
		t.Fatal(err)
	}
	imported, err := s.artifacts.ImportArtifacts(t.Context(), &storagev1.ImportArtifactsRequest{Files: []*storagev1.LocalFile{{Path: file}}})
	if err != nil {
		t.Fatal(err)
	}
	snapshot := imported.GetArtifacts()[0].GetContentId()
	if again := put(t, s, "run-a", "of a snapshot"); again != snapshot {
		t.Fatalf("%s is not %s", again, snapshot)
	}
	left := func(want ...bool) {
		t.Helper()
		stat, err := s.artifacts.StatArtifacts(t.Context(), &storagev1.StatArtifactsRequest{ContentIds: []string{own, shared, snapshot}})
		if err != nil {
			t.Fatal(err)
		}
		for n, a := range stat.GetArtifacts() {
			if a.GetExists() != want[n] {
				t.Errorf("artifact %d exists: %t, want %t", n, a.GetExists(), want[n])
			}
		}
	}
	remove := func(run string) {
		t.Helper()
		if _, err := s.artifacts.DeleteArtifacts(t.Context(), &storagev1.DeleteArtifactsRequest{ContentIds: []string{own, shared, snapshot}, RunId: run, Fence: by}); err != nil {
			t.Fatal(err)
		}
	}
	remove("run-c") // has stored none of them
	left(true, true, true)
	for range 2 {
		if _, err := s.events.DeleteRun(t.Context(), &storagev1.DeleteRunRequest{RunId: "run-a", Fence: by}); err != nil {
			t.Fatal(err)
		}
	}
	left(false, true, true)
	remove("run-b")
	left(false, false, true)
	remove("") // the snapshot service
	left(false, false, false)
}
