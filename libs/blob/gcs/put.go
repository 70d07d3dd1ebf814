package gcs

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"cloud.google.com/go/storage"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/resume"
)

// writerMark is the metadata entry that names the call of Put which made an object.
const writerMark = "rollout-writer"

// Put implements blob.Writer: in one request, or in chunks where r gives more than PartBytes.
func (s *Store) Put(ctx context.Context, key string, r io.Reader) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	if err := ctx.Err(); err != nil {
		return blob.Info{}, fmt.Errorf("put blob %s: %w", key, err)
	}
	writing, cancel := context.WithCancel(ctx)
	defer cancel() // of a writer that was not closed, so the upload is given up
	// The client retries a request without progress forever.
	var stuck atomic.Bool
	guard := time.AfterFunc(giveUp, func() { stuck.Store(true); cancel() })
	defer guard.Stop()
	object := s.object(key)
	w := object.If(storage.Conditions{DoesNotExist: true}).NewWriter(writing)
	mark := rand.Text()
	w.Metadata = map[string]string{writerMark: mark}
	w.ChunkSize, w.ChunkTransferTimeout, w.ChunkRetryDeadline = s.c.PartBytes, chunkTimeout, chunkTries
	w.ProgressFunc = func(int64) { guard.Reset(giveUp) }
	w.ContentType = "application/octet-stream" // otherwise the client guesses it from the first bytes

	// The first chunk is read before anything is sent, because if it is the whole blob, its checksum
	// can be sent first.
	var first bytes.Buffer
	_, err := io.CopyN(&first, r, int64(s.c.PartBytes))
	if err != nil && !errors.Is(err, io.EOF) {
		return blob.Info{}, fmt.Errorf("put blob %s: %w", key, err)
	}
	sum := resume.NewCRC()
	sum.Write(first.Bytes())
	if errors.Is(err, io.EOF) {
		w.CRC32C, w.SendCRC32C = sum.Sum32(), true
		r = bytes.NewReader(nil)
	} else if _, err := s.Stat(ctx, key); err == nil { // avoids sending many bytes for nothing
		return blob.Info{}, fmt.Errorf("put blob %s: %w", key, blob.ErrExists)
	}
	source := &sourceReader{r: io.TeeReader(r, sum)}
	if _, err = w.Write(first.Bytes()); err == nil {
		_, err = io.Copy(w, source)
	}
	if source.err != nil {
		return blob.Info{}, fmt.Errorf("put blob %s: %w", key, source.err)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil && stuck.Load() {
		return blob.Info{}, fmt.Errorf("put blob %s: %w", key, blob.ErrUnavailable.Wrap(err))
	}
	attrs := w.Attrs()
	if err != nil {
		if attrs, err = s.settle(ctx, key, mark, err); err != nil {
			return blob.Info{}, err
		}
	}
	if attrs.CRC32C != sum.Sum32() {
		_ = object.Generation(attrs.Generation).Delete(context.WithoutCancel(ctx)) // the stored blob differs from the one that was put
		return blob.Info{}, fmt.Errorf("put blob %s: %w", key, blob.ErrCorrupt.With("key", key).
			With("crc32c", fmt.Sprintf("%08x", sum.Sum32())).With("stored", fmt.Sprintf("%08x", attrs.CRC32C)))
	}
	return info(key, attrs), nil
}

// settle interprets a failed creation. If the answer to a first request was lost, a repeated
// request is refused because the first one succeeded, and an upload whose last chunk arrived does
// not exist any more.
func (s *Store) settle(ctx context.Context, key, mark string, err error) (*storage.ObjectAttrs, error) {
	mapped := s.mapError("put", key, err)
	lost := errors.Is(mapped, blob.ErrNotFound)
	if !lost && !errors.Is(mapped, blob.ErrExists) {
		return nil, mapped
	}
	attrs, attrsErr := s.object(key).Attrs(ctx)
	switch {
	case attrsErr == nil && attrs.Metadata[writerMark] == mark:
		return attrs, nil
	case attrsErr == nil:
		return nil, fmt.Errorf("put blob %s: %w", key, blob.ErrExists)
	case lost:
		return nil, fmt.Errorf("put blob %s: %w", key, blob.ErrUnavailable.Wrap(err))
	}
	return nil, mapped
}

// sourceReader marks errors of the data to be stored, to distinguish them from errors of the store.
type sourceReader struct {
	r   io.Reader
	err error
}

func (s *sourceReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}
