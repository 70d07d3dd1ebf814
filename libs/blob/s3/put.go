package s3

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/resume"
)

const (
	// writerMark is the metadata entry that names the call of Put which made an object.
	writerMark = "rollout-writer"
	// requestTimeout limits one request with its retries, in case a server stops reading.
	requestTimeout = 5 * time.Minute
)

// Put implements blob.Writer: in one request, or in parts where r gives more than PartBytes. Some
// parts are in memory at a time.
func (s *Store) Put(ctx context.Context, key string, r io.Reader) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	if err := ctx.Err(); err != nil {
		return blob.Info{}, fmt.Errorf("put blob %s: %w", key, err)
	}
	u := &upload{s: s, key: key, writer: rand.Text(), part: s.partSize(r), began: time.Now()}
	first, more, err := readPart(r, u.part)
	if err != nil {
		return blob.Info{}, fmt.Errorf("put blob %s: %w", key, err)
	}
	if !more {
		err = u.whole(ctx, first)
	} else {
		err = u.parts(ctx, first, r)
	}
	if err != nil {
		return blob.Info{}, err
	}
	return u.info(ctx), nil
}

// partSize returns PartBytes, or more if a file would otherwise need too many parts.
func (s *Store) partSize(r io.Reader) int64 {
	if f, ok := r.(*os.File); ok {
		if info, err := f.Stat(); err == nil {
			return max(s.c.PartBytes, (info.Size()+maxParts-1)/maxParts)
		}
	}
	return s.c.PartBytes
}

// readPart reads at most size bytes. more reports whether further bytes may follow.
func readPart(r io.Reader, size int64) (part []byte, more bool, err error) {
	var b bytes.Buffer
	n, err := io.CopyN(&b, r, size)
	if errors.Is(err, io.EOF) {
		return b.Bytes(), false, nil
	}
	return b.Bytes(), n == size, err
}

// upload is one call of Put.
type upload struct {
	s      *Store
	key    string
	writer string
	part   int64
	size   int64
	began  time.Time
}

// whole creates the object in one request.
func (u *upload) whole(ctx context.Context, data []byte) error {
	u.size = int64(len(data))
	request, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := u.s.api.PutObject(request, &s3.PutObjectInput{
		Bucket: &u.s.c.Bucket, Key: u.s.object(u.key), Body: bytes.NewReader(data), ContentLength: aws.Int64(u.size),
		IfNoneMatch: aws.String("*"), ChecksumCRC32C: checksum(crc(data)), ChecksumAlgorithm: types.ChecksumAlgorithmCrc32c,
		Metadata: map[string]string{writerMark: u.writer},
	})
	return u.settle(ctx, err)
}

// settle interprets a refused creation: if the answer to a first request was lost, a repeated
// request is refused because the first one succeeded.
func (u *upload) settle(ctx context.Context, err error) error {
	switch code(err) {
	case precondition, conflict, noUpload:
	default:
		return u.s.mapError("put", u.key, err)
	}
	_, writer, headErr := u.s.head(ctx, u.key)
	switch {
	case headErr == nil && writer == u.writer:
		return nil
	case headErr == nil:
		return fmt.Errorf("put blob %s: %w", u.key, blob.ErrExists)
	case code(err) == precondition:
		return u.s.mapError("put", u.key, err)
	}
	return fmt.Errorf("put blob %s: %w", u.key, blob.ErrUnavailable.Wrap(err))
}

// info describes a stored object. Its time is the server's, if the server still answers.
func (u *upload) info(ctx context.Context) blob.Info {
	if info, _, err := u.s.head(ctx, u.key); err == nil {
		return info
	}
	return blob.Info{Key: u.key, Size: u.size, Modified: u.began.UTC()}
}

func crc(data []byte) uint32 {
	h := resume.NewCRC()
	h.Write(data)
	return h.Sum32()
}

// checksum is S3's text of a CRC.
func checksum(sum uint32) *string {
	return aws.String(base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, sum)))
}
