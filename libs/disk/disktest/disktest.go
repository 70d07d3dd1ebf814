// Package disktest gives tests a small disk.
package disktest

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/rollout-rl/rollout/libs/disk"
)

// Disk is a small file system, mounted for one test.
type Disk struct {
	t   testing.TB
	Dir string
}

// Mount mounts a file system of size, such as "4m". The test is skipped if it may not mount one.
func Mount(t testing.TB, size string) *Disk {
	t.Helper()
	dir := t.TempDir()
	unmount, err := mount(dir, size)
	if err != nil {
		t.Skipf("a tmpfs can't be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := unmount(); err != nil {
			t.Error(err)
		}
	})
	return &Disk{t: t, Dir: dir}
}

// Fill writes a file, as another program would, and leaves that many bytes free; 0: a write of one
// more byte fails.
func (d *Disk) Fill(leave uint64) {
	d.t.Helper()
	space, err := disk.SpaceOf(d.Dir)
	if err != nil {
		d.t.Fatal(err)
	}
	f, err := os.OpenFile(d.ballast(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	_, err = f.Write(make([]byte, space.Free-min(leave, space.Free)))
	for err == nil && leave == 0 {
		_, err = f.Write(make([]byte, 1<<12))
	}
	if err != nil && !errors.Is(err, syscall.ENOSPC) {
		d.t.Fatal(err)
	}
}

// Free removes what Fill wrote.
func (d *Disk) Free() {
	d.t.Helper()
	if err := os.Remove(d.ballast()); err != nil {
		d.t.Fatal(err)
	}
}

func (d *Disk) ballast() string { return filepath.Join(d.Dir, "ballast") }
