package segment

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

// Writer appends to the files of a run. One goroutine at a time.
type Writer struct {
	Config
	last   uint32   // highest number that was begun
	number uint32   // of the file
	file   *os.File // nil: the next append begins a file
	end    uint64
	arena  []byte // records of one append, kept for the next
}

// Record is a payload with its checksum.
type Record struct {
	Payload []byte
	CRC     uint32
}

// Append writes the records in one call and says where they are. They are durable only after Sync. After an error nothing of
// them counts, and the next append begins a new file.
func (w *Writer) Append(records []Record) ([]Place, error) {
	if err := w.ready(); err != nil {
		return nil, err
	}
	places := make([]Place, len(records))
	buf := w.arena[:0]
	for i, r := range records {
		buf = binary.LittleEndian.AppendUint32(buf, uint32(len(r.Payload)))
		buf = binary.LittleEndian.AppendUint32(buf, r.CRC)
		places[i] = Place{Segment: w.number, Offset: w.end + uint64(len(buf)), Length: uint64(len(r.Payload))}
		buf = append(buf, r.Payload...)
	}
	w.arena = buf
	if _, err := w.file.WriteAt(buf, int64(w.end)); err != nil {
		return nil, errors.Join(fmt.Errorf("append to segment %d: %w", w.number, err), w.Close())
	}
	w.end += uint64(len(buf))
	return places, nil
}

// Sync makes what was appended durable. After an error the kernel may have dropped any of it: the next append begins a new file.
func (w *Writer) Sync() error {
	if w.file == nil || w.Volatile {
		return nil
	}
	if err := w.Datasync(w.file); err != nil {
		return errors.Join(fmt.Errorf("sync segment %d: %w", w.number, err), w.Close())
	}
	return nil
}

// Tail is the end of what was appended; Segment is 0 before the first append.
func (w *Writer) Tail() Tail { return Tail{Segment: w.number, Bytes: w.end} }

// Close closes the file; an append after it begins a new one.
func (w *Writer) Close() error {
	if w.file == nil {
		return nil
	}
	f := w.file
	w.file = nil
	return f.Close()
}

// ready begins a file where there is none or the last is full.
func (w *Writer) ready() error {
	if w.file != nil && w.end < w.RollBytes {
		return nil
	}
	if err := w.Close(); err != nil {
		return fmt.Errorf("close segment %d: %w", w.number, err)
	}
	f, err := w.begin()
	if err != nil {
		return err
	}
	w.number, w.file, w.end = w.last, f, uint64(len(magic))
	return nil
}

// begin makes the file of the next number.
func (w *Writer) begin() (*os.File, error) {
	number := w.last + 1
	f, err := os.OpenFile(Path(w.Dir, number), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	for errors.Is(err, os.ErrExist) { // begun before, by us in vain or by a process that led before: two never write to one file
		number++
		f, err = os.OpenFile(Path(w.Dir, number), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("begin segment: %w", err)
	}
	if _, err := f.WriteAt([]byte(magic), 0); err != nil {
		return nil, errors.Join(fmt.Errorf("begin segment: %w", err), f.Close())
	}
	if w.Volatile {
		w.last = number
		return f, nil
	}
	if err := syncDir(w.Dir); err != nil {
		return nil, errors.Join(fmt.Errorf("begin segment: %w", err), f.Close())
	}
	w.last = number
	return f, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
