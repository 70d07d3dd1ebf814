// Package segment keeps payloads in append-only files.
//
// A file is the magic "RSEG0001", then records "u32 length | u32 crc32c | payload", little-endian. Files of a run are numbered
// from 1. What is durable is for the
// ledger to say: bytes beyond that are the tail that a crash tore.
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

// Path is the file of a segment.
func Path(dir string, number uint32) string {
	return filepath.Join(dir, fmt.Sprintf("%06d.seg", number))
}

// Place is where a payload is.
type Place struct {
	Segment uint32
	Offset  uint64 // of the payload's first byte
	Length  uint64 // of the payload
}

// Tail is the end of what was written to, or is durable of, a file.
type Tail struct {
	Segment uint32 // 0: there is none yet
	Bytes   uint64 // size of that file
}

// Config is how the files of a run are written.
type Config struct {
	Dir       string // made where it is missing
	RollBytes uint64 // a file this long is followed by the next
	// Volatile leaves it to the kernel when to write: what was written survives the death of every process, not a power cut.
	Volatile bool
	// Datasync makes the bytes of a file durable; nil: the system's own way.
	Datasync func(*os.File) error
}

// Repair says what Open found beyond, or short of, what is durable.
type Repair struct {
	Cut   uint64 // bytes in files that no ledger row names; they are removed
	Short []Tail // files that lack bytes which the ledger counts on; Bytes is how many
}

// Open readies the files of a run for writing; known are those that the ledger counts on, by number. None of them is ever written to
// again: a process that led before may still have it open. So a torn tail stays where it is, beyond
// what the ledger says is durable, and files that the ledger does not name go.
//
// newest is the highest number that was ever given.
func Open(cfg Config, known []Tail, newest uint32) (*Writer, Repair, error) {
	w, repair, err := ready(cfg, known, newest)
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

// OpenCache readies a folder that is a cache: files may be missing.
func OpenCache(cfg Config, known []Tail, newest uint32) (*Writer, Repair, error) {
	return ready(cfg, known, newest)
}

func ready(cfg Config, known []Tail, newest uint32) (*Writer, Repair, error) {
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

// sweep removes files that were begun and that no ledger row names; last is the highest number among them.
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

// Remove deletes a segment and says how many bytes that freed; one that is gone is no error.
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

// present lists the numbers of the files in a folder, ascending; of a folder that is not there none.
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

// numberOf is the number of the segment in a file of that name.
func numberOf(name string) (uint32, bool) {
	digits, ok := strings.CutSuffix(filepath.Base(name), ".seg")
	n, err := strconv.ParseUint(digits, 10, 32)
	return uint32(n), ok && err == nil
}
