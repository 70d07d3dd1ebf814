package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/resume"
)

// parallel is how many parts are on their way at a time.
const parallel = 4

// abortTimeout bounds the clean-up after a failed upload, whose own context may have ended.
const abortTimeout = 10 * time.Second

// parts creates the object with a multipart upload: each part with its checksum, and the object
// with the checksum of the whole.
func (u *upload) parts(ctx context.Context, first []byte, rest io.Reader) error {
	// Avoids sending many bytes if the blob exists already.
	if _, err := u.s.Stat(ctx, u.key); err == nil {
		return fmt.Errorf("put blob %s: %w", u.key, blob.ErrExists)
	} else if !errors.Is(err, blob.ErrNotFound) {
		return err
	}
	made, err := u.s.api.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{
		Bucket: &u.s.c.Bucket, Key: u.s.object(u.key), Metadata: map[string]string{writerMark: u.writer},
		ChecksumAlgorithm: types.ChecksumAlgorithmCrc32c, ChecksumType: types.ChecksumTypeFullObject,
	})
	if err != nil {
		return u.s.mapError("put", u.key, err)
	}
	parts, sum, err := u.send(ctx, made.UploadId, first, rest)
	if err == nil {
		request, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		_, err = u.s.api.CompleteMultipartUpload(request, &s3.CompleteMultipartUploadInput{
			Bucket: &u.s.c.Bucket, Key: u.s.object(u.key), UploadId: made.UploadId, IfNoneMatch: aws.String("*"),
			ChecksumCRC32C: checksum(sum), ChecksumType: types.ChecksumTypeFullObject,
			MultipartUpload: &types.CompletedMultipartUpload{Parts: parts},
		})
		if err = u.settle(ctx, err); err == nil {
			return nil
		}
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
	defer cancel()
	_, _ = u.s.api.AbortMultipartUpload(undo, &s3.AbortMultipartUploadInput{ // remaining parts are invisible; see the package's comment
		Bucket: &u.s.c.Bucket, Key: u.s.object(u.key), UploadId: made.UploadId,
	})
	return err
}

// send uploads the parts, some at a time, and gives them with the checksum of all bytes.
func (u *upload) send(ctx context.Context, id *string, data []byte, rest io.Reader) ([]types.CompletedPart, uint32, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var parts []types.CompletedPart
	slots := make(chan struct{}, parallel)
	sum := resume.NewCRC()
	for more := true; len(data) > 0 && ctx.Err() == nil; {
		sum.Write(data)
		u.size += int64(len(data))
		if len(parts) == maxParts {
			cancel(blob.ErrTooLarge.With("key", u.key).With("bytes", fmt.Sprint(maxParts*u.part)))
			break
		}
		mu.Lock()
		index := len(parts)
		parts = append(parts, types.CompletedPart{})
		mu.Unlock()
		slots <- struct{}{}
		part := data
		wg.Go(func() {
			defer func() { <-slots }()
			done, err := u.sendPart(ctx, id, int32(index+1), part)
			if err != nil {
				cancel(err)
			}
			mu.Lock()
			defer mu.Unlock()
			parts[index] = done
		})
		data = nil
		if more {
			var err error
			if data, more, err = readPart(rest, u.part); err != nil {
				cancel(fmt.Errorf("put blob %s: %w", u.key, err))
				break
			}
		}
	}
	wg.Wait()
	return parts, sum.Sum32(), context.Cause(ctx)
}

func (u *upload) sendPart(ctx context.Context, id *string, number int32, data []byte) (types.CompletedPart, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	sum := checksum(crc(data))
	out, err := u.s.api.UploadPart(ctx, &s3.UploadPartInput{
		Bucket: &u.s.c.Bucket, Key: u.s.object(u.key), UploadId: id, PartNumber: &number, Body: bytes.NewReader(data),
		ContentLength: aws.Int64(int64(len(data))), ChecksumCRC32C: sum, ChecksumAlgorithm: types.ChecksumAlgorithmCrc32c,
	})
	if err != nil {
		return types.CompletedPart{}, u.s.mapError("put", u.key, err)
	}
	return types.CompletedPart{ETag: out.ETag, PartNumber: &number, ChecksumCRC32C: sum}, nil
}
