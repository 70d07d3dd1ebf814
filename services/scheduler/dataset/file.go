package dataset

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors of a dataset file.
var (
	ErrChanged = rpcerr.New(codes.FailedPrecondition, "DATASET_CHANGED",
		"the dataset has changed since the plan was made; restore the file or make a new plan (`rollout plan`)")
	ErrUnreadable = rpcerr.New(codes.FailedPrecondition, "DATASET_UNREADABLE", "the dataset cannot be read")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// File is a JSON Lines file and the index of its rows: 20 bytes per row in memory, the rows stay on
// disk. Blank lines are not rows. Safe for concurrent use.
type File struct {
	f    *os.File
	path string
	rows []span
}

type span struct {
	offset int64
	length int32
	crc    uint32
}

// Open indexes the file in one pass and verifies digest and rows of the plan. ErrChanged,
// ErrUnreadable. The caller closes the file.
func Open(path, digest string, rows uint64) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, ErrUnreadable.With("path", path).Wrap(err)
	}
	d := &File{f: f, path: path}
	got, err := d.index()
	if err != nil {
		return nil, errors.Join(ErrUnreadable.With("path", path).Wrap(err), f.Close())
	}
	if got != digest || uint64(len(d.rows)) != rows {
		changed := ErrChanged.With("path", path).With("planned", digest).With("found", got)
		return nil, errors.Join(changed.Wrap(fmt.Errorf("%s has %d rows and digest %s; the plan has %d rows and digest %s",
			path, len(d.rows), got, rows, digest)), f.Close())
	}
	return d, nil
}

func (d *File) index() (digest string, err error) {
	h := id.NewHasher()
	r := bufio.NewReaderSize(d.f, 1<<20)
	var offset int64
	var long []byte // a line longer than the reader's buffer
	for {
		line, err := r.ReadSlice('\n')
		_, _ = h.Write(line) // never fails
		if errors.Is(err, bufio.ErrBufferFull) {
			long = append(long, line...)
			continue
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return "", err
		}
		if long != nil {
			line = append(long, line...)
			long = nil
		}
		if row := bytes.TrimSpace(line); len(row) > 0 {
			at := bytes.Index(line, row[:1])
			d.rows = append(d.rows, span{offset + int64(at), int32(len(row)), crc32.Checksum(row, castagnoli)})
		}
		offset += int64(len(line))
		if err != nil {
			return h.ID(), nil
		}
	}
}

// Rows is the number of rows.
func (d *File) Rows() uint64 { return uint64(len(d.rows)) }

// Row reads the JSON of one row, counted from 0. ErrChanged if the row was modified since the file
// was opened.
func (d *File) Row(n uint64) ([]byte, error) {
	if n >= d.Rows() {
		return nil, fmt.Errorf("row %d of %s: the file has %d rows", n, d.path, d.Rows())
	}
	s := d.rows[n]
	row := make([]byte, s.length)
	if _, err := d.f.ReadAt(row, s.offset); err != nil {
		return nil, ErrUnreadable.With("path", d.path).Wrap(err)
	}
	if crc32.Checksum(row, castagnoli) != s.crc {
		return nil, ErrChanged.With("path", d.path).Wrap(fmt.Errorf("row %d of %s was modified while the run reads the file", n, d.path))
	}
	return row, nil
}

// Close closes the file.
func (d *File) Close() error { return d.f.Close() }
