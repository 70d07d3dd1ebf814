// Package segment keeps payloads in append-only files.
//
// A file is the magic "RSEG0001", then records "u32 length | u32 crc32c | payload", little-endian. Files of a run are numbered
// from 1; the highest is written to. What is durable is for the ledger to say: bytes beyond that are the tail that a crash tore.
package segment

import (
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
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

// Tail is the end of what is durable.
type Tail struct {
	Segment uint32 // 0: there is none yet
	Bytes   uint64 // size of that file
}

// Repair says what Open found beyond, or short of, the tail.
type Repair struct {
	Cut     uint64 // bytes of a torn tail that were removed, whole newer files included
	Missing uint64 // bytes that the ledger counts on and the file lacks; they are lost
}

// Open readies the files of a run for writing after the tail; dir is made where it is missing. A torn tail is cut off.
//
// With shared another process may still have the files open, one that led before and only stands still: then what is there is
// left as it is, and writing begins a file of its own.
func Open(dir string, tail Tail, rollBytes uint64, shared bool) (*Writer, Repair, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, Repair{}, fmt.Errorf("open segments: %w", err)
	}
	w := &Writer{dir: dir, number: tail.Segment, roll: rollBytes}
	repair, err := dropNewer(dir, tail.Segment)
	if err != nil || tail.Segment == 0 {
		return w, repair, err
	}
	f, err := os.OpenFile(Path(dir, tail.Segment), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		repair.Missing = tail.Bytes
		return w, repair, nil
	}
	if err != nil {
		return nil, repair, fmt.Errorf("open segment %d: %w", tail.Segment, err)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, repair, errors.Join(fmt.Errorf("open segment %d: %w", tail.Segment, err), f.Close())
	}
	size := uint64(info.Size())
	if size < tail.Bytes { // never written to again: what is lost stays visible
		repair.Missing = tail.Bytes - size
		return w, repair, f.Close()
	}
	if shared {
		return w, repair, f.Close()
	}
	if size > tail.Bytes {
		repair.Cut += size - tail.Bytes
		if err := errors.Join(f.Truncate(int64(tail.Bytes)), f.Sync()); err != nil {
			return nil, repair, errors.Join(fmt.Errorf("cut segment %d: %w", tail.Segment, err), f.Close())
		}
	}
	w.file, w.end = f, tail.Bytes
	return w, repair, nil
}

// OpenAfter readies a folder that is a cache for writing: the next file gets a number above newest, and no file is written to again.
// known is the highest number that a ledger row names; files above it are removed.
func OpenAfter(dir string, known, newest uint32, rollBytes uint64) (*Writer, Repair, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, Repair{}, fmt.Errorf("open segments: %w", err)
	}
	repair, err := dropNewer(dir, known)
	return &Writer{dir: dir, number: max(known, newest), roll: rollBytes}, repair, err
}

// dropNewer removes files that were begun and that no ledger row knows.
func dropNewer(dir string, number uint32) (Repair, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return Repair{}, fmt.Errorf("open segments: %w", err)
	}
	var r Repair
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".seg")
		n, err := strconv.ParseUint(name, 10, 32)
		if !ok || err != nil || uint32(n) <= number {
			continue
		}
		if info, err := e.Info(); err == nil {
			r.Cut += uint64(info.Size())
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return r, fmt.Errorf("open segments: %w", err)
		}
	}
	return r, nil
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
