// Package segment stores payloads in append-only files, and copies of them in a blob store.
//
// A file is the magic "RSEG0001", then records "u32 length | u32 crc32c | payload", little-endian.
// The files of a run are numbered from 1. The ledger records how many bytes of each are durable;
// what follows them was left by a crash and does not count.
package segment

import (
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const (
	magic = "RSEG0001"
	// HeaderBytes precede each payload.
	HeaderBytes = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC is the CRC-32C of a payload.
func CRC(payload []byte) uint32 { return crc32.Checksum(payload, castagnoli) }

// Path is the path of a segment file.
func Path(dir string, number uint32) string {
	return filepath.Join(dir, fmt.Sprintf("%06d.seg", number))
}

// Place is the location of a payload.
type Place struct {
	Segment uint32
	Offset  uint64 // of the payload's first byte
	Length  uint64 // of the payload
}

// Tail is the end of what was written to a file, or of what is durable in it.
type Tail struct {
	Segment uint32 // 0: no file yet
	Bytes   uint64
}

// Config tells how the files of a run are written.
type Config struct {
	Dir       string // created if it is missing
	RollBytes uint64 // a file of this size is followed by the next one
	// Volatile skips syncs: what was written survives the death of every process, but not a power
	// cut.
	Volatile bool
	// Datasync makes the contents of a file durable; nil: fdatasync.
	Datasync func(*os.File) error
}

// Repair tells how the files that Open found differ from what is durable.
type Repair struct {
	Cut   uint64 // bytes of files that no ledger row names; they were deleted
	Short []Tail // files that lack durable bytes; Bytes is how many
}

// Open prepares the files of a run for writing. known are the files that the ledger counts on, by
// number. They are not written to again, because a process that led before may still have them
// open: bytes beyond what is durable stay there. Files that the ledger does not name are deleted.
//
// newest is the highest number that was ever used.
func Open(cfg Config, known []Tail, newest uint32) (*Writer, Repair, error) {
	w, repair, err := prepare(cfg, known, newest)
	if err != nil {
		return nil, repair, err
	}
	for _, k := range known {
		var size uint64
		info, err := os.Stat(Path(cfg.Dir, k.Segment))
		switch {
		case err == nil:
			size = uint64(info.Size())
		case !errors.Is(err, os.ErrNotExist):
			return nil, repair, fmt.Errorf("open segment %d: %w", k.Segment, err)
		}
		if size < k.Bytes {
			repair.Short = append(repair.Short, Tail{Segment: k.Segment, Bytes: k.Bytes - size})
		}
	}
	return w, repair, nil
}

// OpenCache prepares a folder that is a cache: files may be missing.
func OpenCache(cfg Config, known []Tail, newest uint32) (*Writer, Repair, error) {
	return prepare(cfg, known, newest)
}

func prepare(cfg Config, known []Tail, newest uint32) (*Writer, Repair, error) {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, Repair{}, fmt.Errorf("open segments: %w", err)
	}
	named := map[uint32]bool{}
	for _, k := range known {
		named[k.Segment] = true
	}
	repair, swept, err := sweep(cfg.Dir, named)
	if cfg.Datasync == nil {
		cfg.Datasync = datasync
	}
	return &Writer{Config: cfg, last: max(newest, swept)}, repair, err
}

// sweep deletes files that no ledger row names; last is the highest number among them.
func sweep(dir string, named map[uint32]bool) (r Repair, last uint32, err error) {
	numbers, err := present(dir)
	if err != nil {
		return r, 0, fmt.Errorf("open segments: %w", err)
	}
	for _, n := range numbers {
		if named[n] {
			continue
		}
		last = max(last, n)
		freed, err := Remove(dir, n)
		if err != nil {
			return r, last, fmt.Errorf("open segments: %w", err)
		}
		r.Cut += freed
	}
	return r, last, nil
}

// Remove deletes a segment file and returns the number of bytes that were freed, 0 if there is
// none.
func Remove(dir string, number uint32) (uint64, error) {
	path := Path(dir, number)
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("remove segment %d: %w", number, err)
	}
	if err := os.Remove(path); err != nil {
		return 0, fmt.Errorf("remove segment %d: %w", number, err)
	}
	return uint64(info.Size()), nil
}

// present lists the numbers of the files in a folder in ascending order; none if the folder is
// missing.
func present(dir string) (numbers []uint32, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list segments: %w", err)
	}
	for _, e := range entries {
		if n, ok := numberOf(e.Name()); ok {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers, nil
}

// numberOf is the number of the segment in a file with a name.
func numberOf(name string) (uint32, bool) {
	digits, ok := strings.CutSuffix(filepath.Base(name), ".seg")
	n, err := strconv.ParseUint(digits, 10, 32)
	return uint32(n), ok && err == nil
}
