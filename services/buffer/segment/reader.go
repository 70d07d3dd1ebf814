package segment

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

// ErrDamaged means that a file does not contain the payload that was written there.
var ErrDamaged = errors.New("the segment is damaged")

// Reader reads payloads of one run and keeps its files open. Not safe for concurrent use.
type Reader struct {
	dir   string
	files map[uint32]*os.File
}

// NewReader reads the files in dir.
func NewReader(dir string) *Reader { return &Reader{dir: dir, files: map[uint32]*os.File{}} }

// Read returns a payload after verifying its length and checksum. ErrDamaged.
func (r *Reader) Read(p Place, crc uint32) ([]byte, error) {
	f, err := r.open(p.Segment)
	if err != nil {
		return nil, err
	}
	if p.Offset < uint64(len(magic)+HeaderBytes) {
		return nil, damaged(p, "no record begins here")
	}
	record := make([]byte, HeaderBytes+p.Length)
	if _, err := f.ReadAt(record, int64(p.Offset-HeaderBytes)); err != nil {
		return nil, damaged(p, err.Error())
	}
	payload := record[HeaderBytes:]
	switch {
	case uint64(binary.LittleEndian.Uint32(record)) != p.Length:
		return nil, damaged(p, "the length differs")
	case binary.LittleEndian.Uint32(record[4:]) != crc, CRC(payload) != crc:
		return nil, damaged(p, "the checksum differs")
	}
	return payload, nil
}

// Forget closes a file that was replaced.
func (r *Reader) Forget(number uint32) {
	if f := r.files[number]; f != nil {
		_ = f.Close() // the file was only read
		delete(r.files, number)
	}
}

// Close closes the files.
func (r *Reader) Close() error {
	var errs []error
	for _, f := range r.files {
		errs = append(errs, f.Close())
	}
	clear(r.files)
	return errors.Join(errs...)
}

func (r *Reader) open(number uint32) (*os.File, error) {
	if f := r.files[number]; f != nil {
		return f, nil
	}
	f, err := os.Open(Path(r.dir, number))
	if err != nil {
		return nil, fmt.Errorf("%w: segment %d: %w", ErrDamaged, number, err)
	}
	head := make([]byte, len(magic))
	if _, err := f.ReadAt(head, 0); err != nil || string(head) != magic {
		return nil, errors.Join(fmt.Errorf("%w: segment %d: it does not begin with %q", ErrDamaged, number, magic), f.Close())
	}
	r.files[number] = f
	return f, nil
}

func damaged(p Place, why string) error {
	return fmt.Errorf("%w: segment %d at byte %d: %s", ErrDamaged, p.Segment, p.Offset, why)
}
