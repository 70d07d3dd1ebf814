package gcs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strings"

	"cloud.google.com/go/storage"
	"google.golang.org/api/iterator"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/resume"
)

// Get implements blob.Reader. A connection that breaks in the middle is replaced by one to the same
// generation of the object.
func (s *Store) Get(ctx context.Context, key string, r blob.Range) (io.ReadCloser, error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, err
	}
	if r.Offset < 0 || r.Length < 0 {
		return nil, blob.ErrBadRange.With("key", key)
	}
	length := r.Length
	if length == 0 {
		length = -1
	}
	object := s.object(key)
	connection, cancel := context.WithCancel(ctx)
	first, err := s.open(connection, object, r.Offset, length)
	if err != nil {
		cancel()
		if status(err) == http.StatusRequestedRangeNotSatisfiable {
			return s.end(ctx, key, r)
		}
		return nil, s.mapError("get", key, err)
	}
	source := resume.Source{Key: key, Length: first.Remain(), Idle: s.c.Idle}
	if (r == blob.Range{}) && first.Attrs.CRC32C != 0 { // 0 means none
		source.CRC = &first.Attrs.CRC32C
	}
	generation := first.Attrs.Generation
	source.Open = func(ctx context.Context, from int64) (io.ReadCloser, error) {
		same := object
		if generation != 0 {
			same = object.Generation(generation)
		}
		body, err := s.open(ctx, same, r.Offset+from, source.Length-from)
		if err != nil {
			return nil, s.mapError("get", key, err)
		}
		return body, nil
	}
	return resume.New(ctx, source, first, cancel), nil
}

func (s *Store) open(ctx context.Context, o *storage.ObjectHandle, offset, length int64) (*storage.Reader, error) {
	return o.NewRangeReader(ctx, offset, length, storage.WithDisableReaderChecksum()) // package resume checks
}

// end answers for a range that begins past the last byte: at the size of the blob it is empty.
func (s *Store) end(ctx context.Context, key string, r blob.Range) (io.ReadCloser, error) {
	info, err := s.Stat(ctx, key)
	if err != nil {
		return nil, err
	}
	if r.Offset > info.Size {
		return nil, fmt.Errorf("get blob %s: %w", key, blob.ErrBadRange.With("key", key))
	}
	return io.NopCloser(bytes.NewReader(nil)), nil
}

// Stat implements blob.Reader.
func (s *Store) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	attrs, err := s.object(key).Attrs(ctx)
	if err != nil {
		return blob.Info{}, s.mapError("stat", key, err)
	}
	return info(key, attrs), nil
}

func info(key string, a *storage.ObjectAttrs) blob.Info {
	return blob.Info{Key: key, Size: a.Size, Modified: a.Created.UTC()}
}

// List implements blob.Reader.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		query := &storage.Query{Prefix: s.name(prefix), Projection: storage.ProjectionNoACL}
		if err := query.SetAttrSelection([]string{"Name", "Size", "Created"}); err != nil {
			yield(blob.Info{}, s.mapError("list", prefix+"*", err))
			return
		}
		for objects := s.bucket.Objects(ctx, query); ; {
			attrs, err := objects.Next()
			if errors.Is(err, iterator.Done) {
				return
			}
			if err != nil {
				yield(blob.Info{}, s.mapError("list", prefix+"*", err))
				return
			}
			key := attrs.Name
			if s.c.Prefix != "" {
				key = strings.TrimPrefix(key, s.c.Prefix+"/")
			}
			if blob.CheckKey(key) != nil { // not a blob, for example a "folder/" that a web console created
				continue
			}
			if !yield(info(key, attrs), nil) {
				return
			}
		}
	}
}

// Delete implements blob.Writer.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	// Blobs never change, so deleting twice is deleting once: it may be sent again.
	err := s.object(key).Retryer(storage.WithPolicy(storage.RetryAlways)).Delete(ctx)
	if err = s.mapError("delete", key, err); errors.Is(err, blob.ErrNotFound) {
		return nil
	}
	return err
}
