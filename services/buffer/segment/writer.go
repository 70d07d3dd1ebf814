package segment

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

// Writer appends to the files of a run. Not safe for concurrent use.
type Writer struct {
	Config
	last   uint32   // highest number that was created
	number uint32   // of the file
	file   *os.File // nil: the next append creates a file
	end    uint64
	buffer []byte // records of one append, reused by the next one
}

// Record is a payload with its checksum.
type Record struct {
	Payload []byte
	CRC     uint32
}

// Append writes the records in one system call and returns their places. They are durable after
// Sync. After an error none of them counts, and the next append creates a new file.
func (w *Writer) Append(records []Record) ([]Place, error) {
	if err := w.roll(); err != nil {
		return nil, err
	}
	places := make([]Place, len(records))
	buf := w.buffer[:0]
	for i, r := range records {
		buf = binary.LittleEndian.AppendUint32(buf, uint32(len(r.Payload)))
		buf = binary.LittleEndian.AppendUint32(buf, r.CRC)
		places[i] = Place{Segment: w.number, Offset: w.end + uint64(len(buf)), Length: uint64(len(r.Payload))}
		buf = append(buf, r.Payload...)
	}
	w.buffer = buf
	if _, err := w.file.WriteAt(buf, int64(w.end)); err != nil {
		return nil, errors.Join(fmt.Errorf("append to segment %d: %w", w.number, err), w.Close())
	}
	w.end += uint64(len(buf))
	return places, nil
}

// Sync makes what was appended durable. After an error the kernel may have dropped any of it, so
// the next append creates a new file.
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

// Close closes the file; the next append creates a new one.
func (w *Writer) Close() error {
	if w.file == nil {
		return nil
	}
	f := w.file
	w.file = nil
	return f.Close()
}

// roll creates a file unless the current one has room.
func (w *Writer) roll() error {
	if w.file != nil && w.end < w.RollBytes {
		return nil
	}
	if err := w.Close(); err != nil {
		return fmt.Errorf("close segment %d: %w", w.number, err)
	}
	f, err := w.create()
	if err != nil {
		return err
	}
	w.number, w.file, w.end = w.last, f, uint64(len(magic))
	return nil
}

// create creates the file with the next number.
func (w *Writer) create() (*os.File, error) {
	number := w.last + 1
	f, err := os.OpenFile(Path(w.Dir, number), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	for errors.Is(err, os.ErrExist) { // created by a failed attempt or a previous leader, so it must not be written
		number++
		f, err = os.OpenFile(Path(w.Dir, number), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("create segment: %w", err)
	}
	if _, err := f.WriteAt([]byte(magic), 0); err != nil {
		return nil, errors.Join(fmt.Errorf("create segment: %w", err), f.Close())
	}
	if w.Volatile {
		w.last = number
		return f, nil
	}
	if err := syncDir(w.Dir); err != nil {
		return nil, errors.Join(fmt.Errorf("create segment: %w", err), f.Close())
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
