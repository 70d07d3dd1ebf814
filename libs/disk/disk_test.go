package disk_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/rollout-rl/rollout/libs/disk"
	"github.com/rollout-rl/rollout/libs/disk/disktest"
)

func TestSpaceOfAFolderThatIsNotMadeYet(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	there, err := disk.SpaceOf(dir)
	if err != nil || there.Size == 0 || there.Free > there.Size {
		t.Fatalf("%+v: %v", there, err)
	}
	if later, err := disk.SpaceOf(filepath.Join(dir, "runs", "run-1")); err != nil || later.Size != there.Size {
		t.Errorf("%+v: %v", later, err)
	}
}

// The reserve counts what the next write needs, and is free again with a margin only, so that a run
// does not alternate between two states.
func TestReserve(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	space, err := disk.SpaceOf(dir)
	if err != nil {
		t.Fatal(err)
	}
	small := disk.NewReserve(dir, 1)
	if got := small.Missing(0, "", false); got != "" {
		t.Errorf("an empty disk: %q", got)
	}
	got := small.Missing(space.Size+1, "the next snapshot", false)
	if !strings.HasPrefix(got, dir+" has ") || !strings.Contains(got, "the next snapshot needs ") {
		t.Errorf("a snapshot larger than the disk: %q", got)
	}
	if got := small.Missing(0, "", true); got == "" {
		t.Error("a failed write: nothing is missing")
	}
	if got := disk.NewReserve(dir, space.Size+1).Missing(0, "", false); !strings.Contains(got, "less than its reserve") {
		t.Errorf("a reserve larger than the disk: %q", got)
	}
	margin := disk.NewReserve(dir, space.Free-space.Free/16) // reached only with the margin of a quarter
	if got := margin.Missing(0, "", false); got != "" {
		t.Errorf("above the reserve: %q", got)
	}
	margin.Missing(0, "", true)
	if got := margin.Missing(0, "", false); got == "" {
		t.Error("continues without a margin")
	}
}

func TestBytes(t *testing.T) {
	t.Parallel()
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1 << 20: "1.0 MiB", 300 << 20: "300 MiB", 3 << 30: "3.0 GiB", 1 << 50: "1024 TiB"} {
		if got := disk.Bytes(n); got != want {
			t.Errorf("%d bytes: %q, want %q", n, got, want)
		}
	}
}

// A disk without inodes has free bytes. It stays full until a file can be made again.
func TestReserveWithoutInodes(t *testing.T) {
	t.Parallel()
	dir := disktest.Mount(t, "4m,nr_inodes=16").Dir
	made := 0
	for ; ; made++ {
		err := os.WriteFile(filepath.Join(dir, strconv.Itoa(made)), nil, 0o600)
		if errors.Is(err, syscall.ENOSPC) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	r := disk.NewReserve(dir, 1)
	r.Missing(0, "", true)
	for range 3 {
		if got := r.Missing(0, "", false); !strings.Contains(got, "no file can be written") {
			t.Fatalf("without inodes: %q", got)
		}
	}
	if err := os.Remove(filepath.Join(dir, "0")); err != nil {
		t.Fatal(err)
	}
	if got := r.Missing(0, "", false); got != "" {
		t.Errorf("with a free inode: %q", got)
	}
	if left, err := filepath.Glob(filepath.Join(dir, ".probe-*")); err != nil || len(left) > 0 {
		t.Errorf("left %v: %v", left, err)
	}
}
