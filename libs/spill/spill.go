// Package spill sorts more records than memory holds: it collects them up to a number of bytes,
// writes each collection in order to a temporary file, and merges the files when it reads.
package spill

import (
	"bufio"
	"bytes"
	"cmp"
	"container/heap"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

const (
	collected  = 2 << 20  // bytes of records in memory
	readBuffer = 32 << 10 // bytes per run that is merged
)

// Sorter sorts records by key, and records with the same key in the order in which they were added.
// It is not safe for concurrent use.
type Sorter struct {
	folder  string
	file    *os.File // nil: nothing was written yet
	written int64
	runs    []run
	arena   []byte   // of the records in memory: keys and values
	spare   []byte   // the arena after the next flush
	records []record // in memory, in the order in which they were added
	last    []byte   // largest key of the last run
}

// run is a sorted range of the file.
type run struct{ from, to int64 }

// record is a record in the arena: its key, and then its value.
type record struct{ at, value, end uint32 }

// New returns a sorter with temporary files in folder; "": os.TempDir. Nothing is written before
// the records exceed the memory.
func New(folder string) *Sorter { return &Sorter{folder: folder} }

// Add copies a record.
func (s *Sorter) Add(key, value []byte) error {
	if len(s.arena) > 0 && len(s.arena)+len(key)+len(value) > collected {
		if err := s.flush(); err != nil {
			return err
		}
	}
	at := uint32(len(s.arena))
	s.arena = append(append(s.arena, key...), value...)
	s.records = append(s.records, record{at, at + uint32(len(key)), uint32(len(s.arena))})
	return nil
}

func (s *Sorter) key(r record) []byte { return s.arena[r.at:r.value] }

func (s *Sorter) sort() {
	slices.SortStableFunc(s.records, func(x, y record) int { return bytes.Compare(s.key(x), s.key(y)) })
}

// flush writes records in memory to the file, as a new run or at the end of the last one. In that
// case the larger half stays in memory, so that records that were added almost in order make one
// run.
func (s *Sorter) flush() error {
	if s.file == nil {
		f, err := os.CreateTemp(s.folder, ".rollout-sort-*")
		if err != nil {
			return fmt.Errorf("sort rows: %w", err)
		}
		if err := os.Remove(f.Name()); err != nil { // its space is free when it is closed
			return errors.Join(fmt.Errorf("sort rows: %w", err), f.Close())
		}
		s.file = f
	}
	s.sort()
	from, n := s.written, len(s.records)
	extends := len(s.runs) == 0 || bytes.Compare(s.last, s.key(s.records[0])) <= 0
	if extends {
		n = (n + 1) / 2
	}
	w := bufio.NewWriterSize(io.NewOffsetWriter(s.file, from), 256<<10)
	var head []byte
	for _, r := range s.records[:n] {
		head = binary.AppendUvarint(binary.AppendUvarint(head[:0], uint64(r.value-r.at)), uint64(r.end-r.value))
		_, _ = w.Write(head) // Flush returns the error
		_, _ = w.Write(s.arena[r.at:r.end])
		s.written += int64(len(head)) + int64(r.end-r.at)
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("sort rows: %w", err)
	}
	if extends && len(s.runs) > 0 {
		s.runs[len(s.runs)-1].to = s.written
	} else {
		s.runs = append(s.runs, run{from, s.written})
	}
	s.last = append(s.last[:0], s.key(s.records[n-1])...)
	s.drop(n)
	return nil
}

// drop removes the first records from memory.
func (s *Sorter) drop(n int) {
	kept := s.records[:0]
	s.spare = s.spare[:0]
	for _, r := range s.records[n:] {
		at := uint32(len(s.spare))
		s.spare = append(s.spare, s.arena[r.at:r.end]...)
		kept = append(kept, record{at, at + r.value - r.at, uint32(len(s.spare))})
	}
	s.arena, s.spare, s.records = s.spare, s.arena, kept
}

// Reader reads the records of a sorter in order.
type Reader struct{ sources sources }

// Read returns a reader from the first record. Several may read at a time. Add must not be called
// afterwards.
func (s *Sorter) Read() (*Reader, error) {
	r := &Reader{}
	for at, run := range s.runs {
		in := io.NewSectionReader(s.file, run.from, run.to-run.from)
		r.sources = append(r.sources, &source{order: at, next: stored(bufio.NewReaderSize(in, readBuffer))})
	}
	if len(s.records) > 0 { // the newest records, so they come last among equal keys
		s.sort()
		r.sources = append(r.sources, &source{order: len(s.runs), next: s.memory()})
	}
	for i := len(r.sources) - 1; i >= 0; i-- {
		if err := r.sources[i].advance(); err != nil {
			return nil, err
		}
	}
	heap.Init(&r.sources)
	return r, nil
}

// Next returns the next record, which is valid until the next call. The error is io.EOF after the
// last one.
func (r *Reader) Next() (key, value []byte, err error) {
	for len(r.sources) > 0 {
		first := r.sources[0]
		if first.taken {
			if err := first.advance(); errors.Is(err, io.EOF) {
				heap.Pop(&r.sources)
				continue
			} else if err != nil {
				return nil, nil, err
			}
			heap.Fix(&r.sources, 0)
			continue
		}
		first.taken = true
		return first.key, first.value, nil
	}
	return nil, nil, io.EOF
}

// Close deletes the records.
func (s *Sorter) Close() error {
	s.arena, s.spare, s.records, s.runs = nil, nil, nil, nil
	if s.file == nil {
		return nil
	}
	file := s.file
	s.file = nil
	return file.Close()
}

// memory reads the records in memory.
func (s *Sorter) memory() func() (key, value []byte, err error) {
	left := s.records
	return func() ([]byte, []byte, error) {
		if len(left) == 0 {
			return nil, nil, io.EOF
		}
		r := left[0]
		left = left[1:]
		return s.key(r), s.arena[r.value:r.end], nil
	}
}

// stored reads the records of a run.
func stored(in *bufio.Reader) func() (key, value []byte, err error) {
	var buf []byte
	return func() ([]byte, []byte, error) {
		key, err := binary.ReadUvarint(in)
		if err != nil {
			return nil, nil, err
		}
		value, err := binary.ReadUvarint(in)
		if err != nil {
			return nil, nil, fmt.Errorf("read sorted rows: %w", err)
		}
		buf = slices.Grow(buf[:0], int(key+value))[:key+value]
		if _, err := io.ReadFull(in, buf); err != nil {
			return nil, nil, fmt.Errorf("read sorted rows: %w", err)
		}
		return buf[:key], buf[key:], nil
	}
}

// source is a run that is merged.
type source struct {
	order      int // of the run
	next       func() (key, value []byte, err error)
	key, value []byte
	taken      bool // the record was returned
}

func (s *source) advance() (err error) {
	s.key, s.value, err = s.next()
	s.taken = false
	return err
}

// sources is a heap by key; with equal keys the older run is first.
type sources []*source

func (s sources) Len() int      { return len(s) }
func (s sources) Swap(i, j int) { s[i], s[j] = s[j], s[i] }
func (s *sources) Push(x any)   { *s = append(*s, x.(*source)) }

func (s sources) Less(i, j int) bool {
	return cmp.Or(bytes.Compare(s[i].key, s[j].key), cmp.Compare(s[i].order, s[j].order)) < 0
}

func (s *sources) Pop() any {
	last := (*s)[len(*s)-1]
	*s = (*s)[:len(*s)-1]
	return last
}
