// Package resume reads an object over an unreliable network. A connection that breaks, ends early,
// or transfers nothing is replaced by another one that starts at the byte where it stopped. The
// checksum of a whole object is verified at its end.
package resume

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"time"

	"github.com/rollout-rl/rollout/libs/blob"
)

// Tries is how many connections in a row may bring nothing before the reader gives up.
const Tries = 6

const firstDelay = 50 * time.Millisecond // pause between two connections that returned no bytes; doubles

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// NewCRC is the CRC-32C that object stores keep.
func NewCRC() hash.Hash32 { return crc32.New(castagnoli) }

// Source is an object, or a range of one.
type Source struct {
	Key    string
	Length int64 // bytes to be read in all
	// Open opens a connection that starts at a byte of the range. The context applies to the reads of
	// the result. An error ends the reader, so Open must have retried already if that can help.
	Open func(ctx context.Context, from int64) (io.ReadCloser, error)
	CRC  *uint32       // checksum of the bytes to be read; nil if the store has none
	Idle time.Duration // a connection that transfers nothing for so long is given up
}

// Reader is an io.ReadCloser; not for several goroutines.
type Reader struct {
	ctx    context.Context
	s      Source
	hash   hash.Hash32
	body   io.ReadCloser
	cancel context.CancelFunc
	read   int64
	failed int   // number of consecutive connections that returned no bytes
	err    error // the error that ended the reader
}

// New creates a reader of s that is valid until ctx ends. first is a connection from byte 0, opened
// with its own context; the reader will call its cancel function.
func New(ctx context.Context, s Source, first io.ReadCloser, cancel context.CancelFunc) *Reader {
	return &Reader{ctx: ctx, s: s, hash: NewCRC(), body: first, cancel: cancel}
}

// Read implements io.Reader. blob.ErrCorrupt at the end, blob.ErrUnavailable when nothing comes any
// more.
func (r *Reader) Read(p []byte) (int, error) {
	for r.err == nil {
		if r.read == r.s.Length {
			r.err = r.finish()
			break
		}
		if len(p) == 0 {
			return 0, nil
		}
		n, err := r.attempt(p)
		if n > 0 {
			return n, nil
		}
		if err != nil {
			r.retry(err)
		}
	}
	return 0, r.err
}

// attempt reads once from the connection and opens one if necessary.
func (r *Reader) attempt(p []byte) (int, error) {
	if r.body == nil {
		ctx, cancel := context.WithCancel(r.ctx)
		body, err := r.s.Open(ctx, r.read)
		if err != nil {
			cancel()
			r.err = err
			return 0, nil
		}
		r.body, r.cancel = body, cancel
	}
	idle := time.AfterFunc(r.s.Idle, r.cancel)
	n, err := r.body.Read(p[:min(int64(len(p)), r.s.Length-r.read)])
	silent := !idle.Stop()
	r.hash.Write(p[:n])
	r.read += int64(n)
	if n > 0 {
		r.failed = 0
	}
	switch {
	case err == nil, n > 0:
		return n, nil // the next read returns the error again
	case silent:
		return 0, fmt.Errorf("no byte came for %v", r.s.Idle)
	case errors.Is(err, io.EOF):
		return 0, fmt.Errorf("the connection ended after %d of %d bytes", r.read, r.s.Length)
	}
	return 0, err
}

// retry drops the connection, and gives up where too many in a row brought nothing or the caller's
// context has ended.
func (r *Reader) retry(err error) {
	r.drop()
	if r.ctx.Err() != nil {
		r.err = context.Cause(r.ctx)
		return
	}
	if r.failed++; r.failed >= Tries {
		r.err = fmt.Errorf("read blob %s: %w", r.s.Key, blob.ErrUnavailable.Wrap(err))
		return
	}
	delay := time.NewTimer(firstDelay << (r.failed - 1))
	defer delay.Stop()
	select {
	case <-r.ctx.Done():
		r.err = context.Cause(r.ctx)
	case <-delay.C:
	}
}

func (r *Reader) finish() error {
	if r.s.CRC != nil && *r.s.CRC != r.hash.Sum32() {
		return fmt.Errorf("read blob %s: %w", r.s.Key, blob.ErrCorrupt.With("key", r.s.Key).
			With("crc32c", fmt.Sprintf("%08x", *r.s.CRC)).With("computed", fmt.Sprintf("%08x", r.hash.Sum32())))
	}
	return io.EOF
}

// Close ends the connection.
func (r *Reader) Close() error {
	r.drop()
	if r.err == nil {
		r.err = errors.New("read of a closed blob")
	}
	return nil
}

func (r *Reader) drop() {
	if r.body != nil {
		r.cancel() // called first, because closing may otherwise wait for the rest of the body
		_ = r.body.Close()
		r.body = nil
	}
}
