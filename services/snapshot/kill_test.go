package snapshot_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/snapshot"
	"github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	"github.com/rollout-rl/rollout/services/snapshot/storetest"
)

// boundary kills the process with SIGKILL when it is passed for the nth time.
type boundary struct{ left int }

func (b *boundary) pass() {
	if b.left--; b.left == 0 {
		process, _ := os.FindProcess(os.Getpid())
		_ = process.Kill()
		select {}
	}
}

// killedLedger is a ledger of many payloads, with a boundary before each of them.
type killedLedger struct {
	*boundary
	grpc.ClientStream
	sent int
}

const killedPayloads = 12

func (l *killedLedger) CutLedger(context.Context, *bufferv1.CutLedgerRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[bufferv1.CutLedgerResponse], error) {
	return l, nil
}

func (l *killedLedger) Recv() (*bufferv1.CutLedgerResponse, error) {
	l.pass()
	l.sent++
	switch {
	case l.sent == 1:
		return &bufferv1.CutLedgerResponse{Ledger: &bufferv1.LedgerRecord{State: &bufferv1.LedgerState{Step: 2}}}, nil
	case l.sent <= killedPayloads:
		payload := []byte(strings.Repeat("p", 100_000))
		ref := &bufferv1.SampleRef{Offset: uint64(l.sent-2) * uint64(len(payload)), Length: uint64(len(payload))}
		return &bufferv1.CutLedgerResponse{Samples: []*bufferv1.SampleRecord{{Ref: ref}}, Payloads: [][]byte{payload}}, nil
	}
	return nil, io.EOF
}

// folder is a storage service with one file for each artifact, and a boundary before each file and
// in the middle of it.
type folder struct {
	*boundary
	artifacts
	path string
}

func (f *folder) ImportArtifacts(_ context.Context, in *storagev1.ImportArtifactsRequest, _ ...grpc.CallOption) (*storagev1.ImportArtifactsResponse, error) {
	out := &storagev1.ImportArtifactsResponse{}
	for _, file := range in.GetFiles() {
		f.pass()
		data, err := os.ReadFile(file.GetPath())
		if err != nil {
			return nil, err
		}
		staged := filepath.Join(f.path, "."+file.GetContentId())
		if err := os.WriteFile(staged, data[:len(data)/2], 0o600); err != nil {
			return nil, err
		}
		f.pass()
		if err := errors.Join(os.WriteFile(staged, data, 0o600), os.Rename(staged, filepath.Join(f.path, file.GetContentId()))); err != nil {
			return nil, err
		}
		out.Artifacts = append(out.Artifacts, &storagev1.ArtifactInfo{ContentId: file.GetContentId(), Bytes: uint64(len(data)), Exists: true})
	}
	f.pass()
	return out, nil
}

func (f *folder) DeleteArtifacts(_ context.Context, in *storagev1.DeleteArtifactsRequest, _ ...grpc.CallOption) (*storagev1.DeleteArtifactsResponse, error) {
	for _, content := range in.GetContentIds() {
		f.pass()
		_ = os.Remove(filepath.Join(f.path, content))
	}
	return &storagev1.DeleteArtifactsResponse{}, nil
}

type quiet struct{}

func (quiet) Emit(*eventv1.Event) {}

// creation takes the buffer snapshot of a step in a folder, of which it keeps the newest, and kills
// the process at a boundary; 0: at none.
func creation(t *testing.T, base string, step uint64, killAt int) (*snapshot.Server, snapshot.Store) {
	t.Helper()
	store, err := sqlstore.Open(t.Context(), sqldb.Files(filepath.Join(base, "db")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	b := &boundary{left: killAt}
	server, err := snapshot.New(snapshot.Config{}, snapshot.Deps{
		Store: store, Artifacts: &folder{boundary: b, path: filepath.Join(base, "artifacts")}, Scheduler: &scheduler{}, Buffer: &killedLedger{boundary: b},
		Controller: &scheduler{}, Processes: &processes{}, Events: quiet{},
	})
	if err != nil {
		t.Fatal(err)
	}
	if step == 0 {
		return server, store
	}
	dir := filepath.Join(base, fmt.Sprint("scratch", step))
	content := []byte(fmt.Sprint("state of step ", step))
	hash := id.NewHasher()
	_, _ = hash.Write(content)
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, "f0"), content, 0o600)); err != nil {
		t.Fatal(err)
	}
	made := storetest.Snap("", "run-a", step, "a")
	made.Files[0].Digest = hash.ID()
	capture := step == 2
	if capture {
		made.Kind = snapshot.Buffer
	}
	if _, err := server.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: made, Directory: dir, Capture: capture}); err != nil {
		t.Fatal(err)
	}
	return server, store
}

// Between any two writes of a creation the process may be killed. The snapshots before it stay, and
// what it has stored is deleted at the next start.
func TestAKilledCreationLeavesThePreviousSnapshotWhole(t *testing.T) {
	t.Parallel()
	if base := os.Getenv("SNAPSHOT_KILLED_IN"); base != "" { // the process that is killed
		at, _ := strconv.Atoi(os.Getenv("SNAPSHOT_KILLED_AT"))
		creation(t, base, 2, at)
		return
	}
	for at, killed := 1, true; killed; at++ {
		base := t.TempDir()
		if err := os.Mkdir(filepath.Join(base, "artifacts"), 0o700); err != nil {
			t.Fatal(err)
		}
		creation(t, base, 1, 0)
		child := exec.Command(os.Args[0], "-test.run=^TestAKilledCreationLeavesThePreviousSnapshotWhole$")
		child.Env = append(os.Environ(), "SNAPSHOT_KILLED_IN="+base, fmt.Sprint("SNAPSHOT_KILLED_AT=", at))
		err := child.Run()
		killed = err != nil
		if killed && !strings.Contains(err.Error(), "killed") {
			t.Fatalf("boundary %d: the creation failed: %v", at, err)
		}
		server, store := creation(t, base, 0, 0)
		if _, err := server.DeleteRun(t.Context(), &snapshotv1.DeleteRunRequest{RunId: "run-other"}); err != nil { // sweeps, like a start
			t.Fatal(err)
		}
		whole(t, at, base, store, killed)
	}
}

// whole checks that every file of every manifest exists with its content, and with a killed
// creation nothing else.
func whole(t *testing.T, at int, base string, store snapshot.Store, killed bool) {
	t.Helper()
	snaps, err := store.List(t.Context(), snapshot.Filter{Run: "run-a"})
	if err != nil || len(snaps) == 0 || !killed && len(snaps) != 2 {
		t.Fatalf("boundary %d: %d snapshots, %v", at, len(snaps), err)
	}
	named := map[string]bool{}
	for _, s := range snaps {
		for _, f := range s.GetFiles() {
			named[f.GetDigest()] = true
			file, err := os.Open(filepath.Join(base, "artifacts", f.GetDigest()))
			if err != nil {
				t.Fatalf("boundary %d: snapshot of step %d: %v", at, s.GetStep(), err)
			}
			content, _, err := id.ContentOf(file)
			if _ = file.Close(); err != nil || content != f.GetDigest() {
				t.Errorf("boundary %d: %s of step %d is damaged", at, f.GetPath(), s.GetStep())
			}
		}
	}
	stored, err := os.ReadDir(filepath.Join(base, "artifacts"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range stored {
		if !strings.HasPrefix(file.Name(), ".") && !named[file.Name()] {
			t.Errorf("boundary %d: %s is stored, and no manifest names it", at, file.Name())
		}
	}
	if !killed {
		t.Logf("%d boundaries", at-1)
	}
}
