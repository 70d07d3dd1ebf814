package buffer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// Blobs keeps sealed segments where every host reads them; a blob.Store is one.
type Blobs interface {
	Put(ctx context.Context, key string, r io.Reader) (blob.Info, error)
	Get(ctx context.Context, key string, r blob.Range) (io.ReadCloser, error)
	Delete(ctx context.Context, key string) error
	List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error]
}

// vault is the sealed segments of one run. Each ingest seals one: its file is closed and put as a blob before the ledger counts on it
// and before anything is acked, so local files are a cache. Numbers are given once: a blob of a number that the ledger does not know is
// what a buffer left that died, or lost its lead, between the two.
type vault struct {
	blobs Blobs
	run   string
	dir   string // of the local files
}

func (v vault) prefix() string { return "segments/" + v.run + "/" }

func (v vault) key(number uint32) string { return fmt.Sprintf("%s%06d.seg", v.prefix(), number) }

// seal makes a local file a blob. blob.ErrExists where somebody else took the number.
func (v vault) seal(ctx context.Context, number uint32) error {
	f, err := os.Open(segment.Path(v.dir, number))
	if err != nil {
		return fmt.Errorf("seal segment %d: %w", number, err)
	}
	defer f.Close()
	if _, err := v.blobs.Put(ctx, v.key(number), f); err != nil {
		return fmt.Errorf("seal segment %d of %s: %w", number, v.run, err)
	}
	return nil
}

// fetch makes a blob a local file again. blob.ErrNotFound, blob.ErrCorrupt.
func (v vault) fetch(ctx context.Context, number uint32) (err error) {
	body, err := v.blobs.Get(ctx, v.key(number), blob.Range{})
	if err != nil {
		return fmt.Errorf("fetch segment %d of %s: %w", number, v.run, err)
	}
	defer body.Close()
	if err := os.MkdirAll(v.dir, 0o700); err != nil {
		return fmt.Errorf("fetch segment %d: %w", number, err)
	}
	f, err := os.CreateTemp(v.dir, ".fetch-*")
	if err != nil {
		return fmt.Errorf("fetch segment %d: %w", number, err)
	}
	defer os.Remove(f.Name())
	_, err = io.Copy(f, body)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("fetch segment %d of %s: %w", number, v.run, err)
	}
	return os.Rename(f.Name(), segment.Path(v.dir, number))
}

// newest is the highest number that is taken, 0 for none.
func (v vault) newest(ctx context.Context) (newest uint32, err error) {
	for number, err := range v.numbers(ctx) {
		if err != nil {
			return 0, err
		}
		newest = max(newest, number)
	}
	return newest, nil
}

func (v vault) numbers(ctx context.Context) iter.Seq2[uint32, error] {
	return func(yield func(uint32, error) bool) {
		for info, err := range v.blobs.List(ctx, v.prefix()) {
			if err != nil {
				yield(0, fmt.Errorf("list the segments of %s: %w", v.run, err))
				return
			}
			name := strings.TrimSuffix(filepath.Base(info.Key), ".seg")
			if n, err := strconv.ParseUint(name, 10, 32); err == nil && !yield(uint32(n), nil) {
				return
			}
		}
	}
}

// drop deletes blobs of segments that the ledger has trimmed, and those below the last one that it never knew.
func (v vault) drop(ctx context.Context, segments []Segment) error {
	if len(segments) == 0 {
		return nil
	}
	kept := map[uint32]bool{}
	for _, g := range segments {
		kept[g.Number] = !g.Trimmed
	}
	var drop []uint32
	for number, err := range v.numbers(ctx) {
		if err != nil {
			return err
		}
		if !kept[number] && number < segments[len(segments)-1].Number {
			drop = append(drop, number)
		}
	}
	for _, number := range drop {
		if err := v.blobs.Delete(ctx, v.key(number)); err != nil {
			return fmt.Errorf("delete segment %d of %s: %w", number, v.run, err)
		}
	}
	return nil
}
