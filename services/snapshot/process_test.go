package snapshot_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/checkpoint"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/snapshot/storetest"
)

// processes are those of one run. A dump writes one file.
type processes struct {
	pids  []int
	error error
}

func (p *processes) Of(string) ([]int, error) { return p.pids, nil }

func (p *processes) Dump(_ context.Context, _ int, dir string, keep bool) (checkpoint.Image, error) {
	if p.error != nil || !keep {
		return checkpoint.Image{}, p.error
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return checkpoint.Image{}, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return checkpoint.Image{}, checkpoint.Fail(checkpoint.ReasonExists, "", "%v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "pages-1.img"), []byte("memory"), 0o600); err != nil {
		return checkpoint.Image{}, err
	}
	return checkpoint.Write(dir, checkpoint.Image{Processes: []checkpoint.Task{{PID: 7}}})
}

func TestASnapshotOfProcessesHasAnImageOfEach(t *testing.T) {
	t.Parallel()
	w := setup(t)
	create := func(step uint64) (*snapshotv1.CreateSnapshotResponse, error) {
		want := storetest.Snap("", "run-a", step, "a")
		want.Kind = snapshotv1.SnapshotKind_SNAPSHOT_KIND_PROCESS
		return w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: want, Directory: t.TempDir(), Capture: true})
	}
	w.processes.pids = []int{41, 43}
	made, err := create(1)
	if err != nil {
		e, _ := rpcerr.From(err)
		t.Fatal(err, e.Violations())
	}
	var paths []string
	for _, f := range made.GetSnapshot().GetFiles()[1:] {
		paths = append(paths, f.GetPath())
	}
	if got := strings.Join(paths, " "); got != "processes/41/pages-1.img processes/41/process.json processes/43/pages-1.img processes/43/process.json" {
		t.Errorf("files: %s", got)
	}
	to := &snapshotv1.MaterializeSnapshotRequest{SnapshotId: made.GetSnapshot().GetSnapshotId(), Directory: "/to"}
	if _, err := w.MaterializeSnapshot(t.Context(), to); err != nil {
		t.Fatal(err)
	}
	for _, f := range w.artifacts.exported {
		if image := strings.HasPrefix(f.GetPath(), "/to/processes/"); f.GetPrivate() != image {
			t.Errorf("%s is private: %t, want %t", f.GetPath(), f.GetPrivate(), image)
		}
	}
	if n := len(w.artifacts.exported); n != 5 {
		t.Errorf("%d files were written, want the four of the images and one", n)
	}

	w.processes.error = checkpoint.Fail(checkpoint.ReasonConfined, "save the state", "process 41 is confined")
	_, err = create(2)
	if rpcerr.Reason(err) != checkpoint.ReasonConfined || rpcerr.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "confined") {
		t.Errorf("a confined process: %v", err)
	}
	w.processes.error, w.processes.pids = nil, nil
	if _, err = create(3); rpcerr.Reason(err) != "PROCESS_NONE" {
		t.Errorf("no process: %v", err)
	}
	without := storetest.Snap("", "run-a", 4, "a")
	without.Kind = snapshotv1.SnapshotKind_SNAPSHOT_KIND_PROCESS
	_, err = w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: without, Directory: "/scratch"})
	if rpcerr.Reason(err) != "SNAPSHOT_INVALID" {
		t.Errorf("without an image: %v", err)
	}
}

// The controller repeats a creation after a failure of the storage service, in the same folder.
func TestACreationWithProcessesCanBeRepeated(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.processes.pids, w.artifacts.down = []int{41}, 1
	want := storetest.Snap("", "run-a", 1, "a")
	want.Kind = snapshotv1.SnapshotKind_SNAPSHOT_KIND_PROCESS
	again := &snapshotv1.CreateSnapshotRequest{Snapshot: want, Directory: t.TempDir(), Capture: true}
	if _, err := w.CreateSnapshot(t.Context(), again); rpcerr.Code(err) != codes.Unavailable {
		t.Fatalf("storage is down: %v", err)
	}
	if _, err := w.CreateSnapshot(t.Context(), again); err != nil {
		t.Errorf("the second attempt: %v", err)
	}
}
