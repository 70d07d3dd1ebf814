package segment

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"os"

	"github.com/rollout-rl/rollout/libs/blob"
)

// Blobs is a blob store that every host can read; a blob.Store is one.
type Blobs interface {
	Put(ctx context.Context, key string, r io.Reader) (blob.Info, error)
	Get(ctx context.Context, key string, r blob.Range) (io.ReadCloser, error)
	Delete(ctx context.Context, key string) error
	List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error]
}

// Bucket stores the segments of one run in a blob store. Each ingest closes its file and uploads it
// before the ledger counts on it and before anything is acked, so local files are a cache. Numbers
// are used once: a blob that the ledger does not know was left by a buffer that died, or lost its
// lead, after the upload.
type Bucket struct {
	blobs Blobs
	run   string
	dir   string
}

// NewBucket stores segments of a run. dir is the folder of its local files. It returns nil if blobs
// is nil.
func NewBucket(blobs Blobs, run, dir string) *Bucket {
	if blobs == nil {
		return nil
	}
	return &Bucket{blobs: blobs, run: run, dir: dir}
}

func (b *Bucket) prefix() string { return "segments/" + b.run + "/" }

func (b *Bucket) key(number uint32) string { return fmt.Sprintf("%s%06d.seg", b.prefix(), number) }

// Upload stores a local file as a blob. blob.ErrExists if another process used the number.
func (b *Bucket) Upload(ctx context.Context, number uint32) error {
	f, err := os.Open(Path(b.dir, number))
	if err != nil {
		return fmt.Errorf("upload segment %d: %w", number, err)
	}
	defer f.Close()
	if _, err := b.blobs.Put(ctx, b.key(number), f); err != nil {
		return fmt.Errorf("upload segment %d of %s: %w", number, b.run, err)
	}
	return nil
}

// Download stores a blob as a local file. blob.ErrNotFound, blob.ErrCorrupt.
func (b *Bucket) Download(ctx context.Context, number uint32) (err error) {
	body, err := b.blobs.Get(ctx, b.key(number), blob.Range{})
	if err != nil {
		return fmt.Errorf("download segment %d of %s: %w", number, b.run, err)
	}
	defer body.Close()
	if err := os.MkdirAll(b.dir, 0o700); err != nil {
		return fmt.Errorf("download segment %d: %w", number, err)
	}
	f, err := os.CreateTemp(b.dir, ".download-*")
	if err != nil {
		return fmt.Errorf("download segment %d: %w", number, err)
	}
	defer os.Remove(f.Name())
	_, err = io.Copy(f, body)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("download segment %d of %s: %w", number, b.run, err)
	}
	return os.Rename(f.Name(), Path(b.dir, number))
}

// Newest is the highest number that is used, 0 if no number is.
func (b *Bucket) Newest(ctx context.Context) (newest uint32, err error) {
	for number, err := range b.numbers(ctx) {
		if err != nil {
			return 0, err
		}
		newest = max(newest, number)
	}
	return newest, nil
}

func (b *Bucket) numbers(ctx context.Context) iter.Seq2[uint32, error] {
	return func(yield func(uint32, error) bool) {
		for info, err := range b.blobs.List(ctx, b.prefix()) {
			if err != nil {
				yield(0, fmt.Errorf("list the segments of %s: %w", b.run, err))
				return
			}
			if n, ok := numberOf(info.Key); ok && !yield(n, nil) {
				return
			}
		}
	}
}

// DeleteAll deletes all blobs of the run.
func (b *Bucket) DeleteAll(ctx context.Context) error { return b.Delete(ctx, math.MaxUint32, nil) }

// Delete deletes the blobs below a number, except those to keep: segments that were trimmed, and
// those that the ledger never knew.
func (b *Bucket) Delete(ctx context.Context, below uint32, keep map[uint32]bool) error {
	var numbers []uint32
	for number, err := range b.numbers(ctx) {
		if err != nil {
			return err
		}
		if number < below && !keep[number] {
			numbers = append(numbers, number)
		}
	}
	for _, number := range numbers {
		if err := b.blobs.Delete(ctx, b.key(number)); err != nil {
			return fmt.Errorf("delete segment %d of %s: %w", number, b.run, err)
		}
	}
	return nil
}
