package segment

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
)

// Lent is a file that a producer on this host appends records to. Safe for concurrent use.
type Lent struct {
	number   uint32
	volatile bool
	sync     func(*os.File) error
	file     *os.File
	inode    uint64
	failed   atomic.Pointer[error] // of Start
}

// Lend begins a file for a producer, in a kept one that nobody maps where there is one (Spare). One goroutine at a time, as all of Writer;
// the file has a life of its own then.
func (w *Writer) Lend() (*Lent, error) {
	f, err := w.again()
	if f == nil && err == nil {
		f, err = w.begin()
	}
	if err != nil {
		return nil, err
	}
	inode, err := inodeOf(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lend segment %d: %w", w.last, err), f.Close())
	}
	return &Lent{number: w.last, volatile: w.Volatile, sync: w.Datasync, file: f, inode: inode}, nil
}

// Number is the segment's.
func (l *Lent) Number() uint32 { return l.number }

// Inode tells the file from another one with its name.
func (l *Lent) Inode() uint64 { return l.inode }

// Begin is where the first record begins.
func (l *Lent) Begin() uint64 { return uint64(len(magic)) }

var windows = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// Check reads the record at a place and holds it against crc. ErrDamaged.
func (l *Lent) Check(p Place, crc uint32) error {
	if p.Offset < uint64(len(magic)+HeaderBytes) {
		return damaged(p, "no record begins there")
	}
	var header [HeaderBytes]byte
	if _, err := l.file.ReadAt(header[:], int64(p.Offset-HeaderBytes)); err != nil {
		return damaged(p, err.Error())
	}
	if uint64(binary.LittleEndian.Uint32(header[:])) != p.Length {
		return damaged(p, "another length")
	}
	window := windows.Get().(*[]byte)
	defer windows.Put(window)
	payload := io.NewSectionReader(l.file, int64(p.Offset), int64(p.Length))
	var sum uint32
	var size uint64
	for {
		n, err := payload.Read(*window)
		sum, size = Extend(sum, (*window)[:n]), size+uint64(n)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return damaged(p, err.Error())
		}
	}
	switch {
	case size != p.Length:
		return damaged(p, "it is cut off")
	case binary.LittleEndian.Uint32(header[4:]) != crc, sum != crc:
		return damaged(p, "another checksum")
	}
	return nil
}

// Start lets the disk begin with what a Sync is to follow, the records whose payloads lie between two places. It waits for nothing and
// promises nothing; what fails, every Sync from then on tells.
func (l *Lent) Start(first, last Place) {
	if l.volatile || first.Offset < HeaderBytes {
		return
	}
	begin := first.Offset - HeaderBytes
	if err := startWriting(l.file, begin, last.Offset+last.Length-begin); err != nil {
		l.failed.CompareAndSwap(nil, &err)
	}
}

// Sync makes durable what the producer has written.
func (l *Lent) Sync() error {
	if l.volatile {
		return nil
	}
	err := l.sync(l.file)
	if failed := l.failed.Load(); failed != nil {
		err = errors.Join(err, *failed)
	}
	if err != nil {
		return fmt.Errorf("sync segment %d: %w", l.number, err)
	}
	return nil
}

// Close ends the lending; the producer's own handle stays open.
func (l *Lent) Close() error { return l.file.Close() }
