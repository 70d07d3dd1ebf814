package s3

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/resume"
)

// Get implements blob.Reader. A connection that breaks in the middle is replaced by one to the same
// version of the object.
func (s *Store) Get(ctx context.Context, key string, r blob.Range) (io.ReadCloser, error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, err
	}
	if r.Offset < 0 || r.Length < 0 {
		return nil, blob.ErrBadRange.With("key", key)
	}
	input := &s3.GetObjectInput{Bucket: &s.c.Bucket, Key: s.object(key), ChecksumMode: types.ChecksumModeEnabled}
	whole := r == blob.Range{}
	if !whole {
		input.Range = aws.String(header(r.Offset, r.Length))
	}
	connection, cancel := context.WithCancel(ctx)
	out, err := s.api.GetObject(connection, input)
	if err != nil {
		cancel()
		if status(err) == http.StatusRequestedRangeNotSatisfiable {
			return s.end(ctx, key, r)
		}
		return nil, s.mapError("get", key, err)
	}
	source := resume.Source{Key: key, Length: aws.ToInt64(out.ContentLength), Idle: s.c.Idle}
	if whole {
		source.CRC = crcOf(out)
	}
	source.Open = func(ctx context.Context, from int64) (io.ReadCloser, error) {
		again, err := s.api.GetObject(ctx, &s3.GetObjectInput{
			Bucket: &s.c.Bucket, Key: s.object(key), IfMatch: out.ETag, Range: aws.String(header(r.Offset+from, source.Length-from)),
		})
		if err != nil {
			return nil, s.mapError("get", key, err)
		}
		return again.Body, nil
	}
	return resume.New(ctx, source, out.Body, cancel), nil
}

// end answers for a range that S3 finds to begin past the last byte: at the size of the blob it is
// empty.
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

func header(offset, length int64) string {
	if length == 0 {
		return fmt.Sprintf("bytes=%d-", offset)
	}
	return fmt.Sprintf("bytes=%d-%d", offset, offset+length-1)
}

// crcOf returns the checksum of the whole object; nil if the store has none. A composite checksum
// is not usable, because it is computed from the checksums of parts.
func crcOf(out *s3.GetObjectOutput) *uint32 {
	if out.ChecksumCRC32C == nil || out.ChecksumType == types.ChecksumTypeComposite {
		return nil
	}
	raw, err := base64.StdEncoding.DecodeString(*out.ChecksumCRC32C)
	if err != nil || len(raw) != 4 {
		return nil
	}
	return aws.Uint32(binary.BigEndian.Uint32(raw))
}

// Stat implements blob.Reader.
func (s *Store) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	info, _, err := s.head(ctx, key)
	if err != nil {
		return blob.Info{}, s.mapError("stat", key, err)
	}
	return info, nil
}

// head describes an object, and reports whether this writer created it.
func (s *Store) head(ctx context.Context, key string) (info blob.Info, writer string, err error) {
	out, err := s.api.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &s.c.Bucket, Key: s.object(key)})
	if err != nil {
		return info, "", err
	}
	return blob.Info{Key: key, Size: aws.ToInt64(out.ContentLength), Modified: aws.ToTime(out.LastModified).UTC()}, out.Metadata[writerMark], nil
}

// List implements blob.Reader.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		pages := s3.NewListObjectsV2Paginator(s.api, &s3.ListObjectsV2Input{Bucket: &s.c.Bucket, Prefix: s.object(prefix)})
		for pages.HasMorePages() {
			page, err := pages.NextPage(ctx)
			if err != nil {
				yield(blob.Info{}, s.mapError("list", prefix+"*", err))
				return
			}
			for _, o := range page.Contents {
				key := aws.ToString(o.Key)
				if s.c.Prefix != "" {
					key = strings.TrimPrefix(key, s.c.Prefix+"/")
				}
				if blob.CheckKey(key) != nil { // not a blob, for example a "folder/" that a web console created
					continue
				}
				if !yield(blob.Info{Key: key, Size: aws.ToInt64(o.Size), Modified: aws.ToTime(o.LastModified).UTC()}, nil) {
					return
				}
			}
		}
	}
}

// Delete implements blob.Writer.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	_, err := s.api.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &s.c.Bucket, Key: s.object(key)})
	if err = s.mapError("delete", key, err); errors.Is(err, blob.ErrNotFound) {
		return nil
	}
	return err
}
