// Package disk measures the space of file systems and keeps a part of it free.
package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
)

// Space is the space of a file system, in bytes.
type Space struct {
	Free uint64 // for users other than root
	Size uint64
}

// SpaceOf returns the space of the file system on which dir is, or would be made.
func SpaceOf(dir string) (Space, error) {
	var st syscall.Statfs_t
	for at := dir; ; at = filepath.Dir(at) {
		err := syscall.Statfs(at, &st)
		if err == nil {
			return Space{Free: st.Bavail * uint64(st.Bsize), Size: st.Blocks * uint64(st.Bsize)}, nil
		}
		if !errors.Is(err, os.ErrNotExist) || at == filepath.Dir(at) {
			return Space{}, fmt.Errorf("space of %s: %w", dir, err)
		}
	}
}

const (
	largestReserve = 1 << 30
	reserveShare   = 10 // of the disk: a tenth
	// A disk on which space was missing has space again when resumeShare/fullShare of the reserve are
	// free.
	resumeShare = 5
	fullShare   = 4
	probeBytes  = 1 << 12
)

// Reserve keeps a part of a disk free. Writers stop before a write fails, because streams and
// databases are usually on the same disk. The reserve lets work in progress finish. Safe for
// concurrent use.
type Reserve struct {
	dir   string
	bytes uint64

	mu      sync.Mutex
	missing string // what is missing; "" while there is space
	failed  bool   // a write has failed, and none has succeeded since
}

// NewReserve keeps bytes free on the disk of dir; 0: a tenth of the disk, at most 1 GiB.
func NewReserve(dir string, bytes uint64) *Reserve { return &Reserve{dir: dir, bytes: bytes} }

// Missing describes what is missing for a write, "" if nothing is. need is the size of the write in
// bytes, 0 if it is small; what names it. failed: a write has failed for lack of space. From then
// on something is missing until a file can be written: a disk without inodes has free bytes.
func (r *Reserve) Missing(need uint64, what string, failed bool) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	space, err := SpaceOf(r.dir)
	if err != nil { // a write reports the error
		space = Space{Free: 1 << 62, Size: 1 << 62}
	}
	reserve := r.bytes
	if reserve == 0 {
		reserve = min(largestReserve, space.Size/reserveShare)
	}
	wanted := reserve + need
	if r.missing != "" {
		wanted = reserve/fullShare*resumeShare + need
	}
	r.missing = ""
	if r.failed = r.failed || failed; r.failed && !failed && space.Free >= wanted {
		if err := probe(r.dir); err != nil {
			r.missing = fmt.Sprintf("%s has %s free, but no file can be written: %s", r.dir, Bytes(space.Free), err)
			return r.missing
		}
		r.failed = false
	}
	if failed || space.Free < wanted {
		r.missing = fmt.Sprintf("%s has %s free, less than its reserve of %s", r.dir, Bytes(space.Free), Bytes(reserve))
		if need > 0 {
			r.missing = fmt.Sprintf("%s has %s free; %s needs %s in addition to the reserve of %s", r.dir, Bytes(space.Free), what, Bytes(need), Bytes(reserve))
		}
	}
	return r.missing
}

// probe writes a small file to the disk of dir and removes it. The error is that of a full disk;
// other failures are reported by the write itself.
func probe(dir string) error {
	f, err := os.CreateTemp(dir, ".probe-*")
	if err == nil {
		_, err = f.Write(make([]byte, probeBytes))
		err = errors.Join(err, f.Sync(), f.Close(), os.Remove(f.Name()))
	}
	for _, full := range []error{syscall.ENOSPC, syscall.EDQUOT} {
		if errors.Is(err, full) {
			return full
		}
	}
	return nil
}

// Bytes writes a number of bytes for people, such as "1.5 GiB".
func Bytes(n uint64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/(1<<10), "KiB"
	for _, next := range []string{"MiB", "GiB", "TiB"} {
		if value < 1000 {
			break
		}
		value, unit = value/(1<<10), next
	}
	if value < 10 {
		return fmt.Sprintf("%.1f %s", value, unit)
	}
	return fmt.Sprintf("%.0f %s", value, unit)
}
