// Package gcs stores blobs in a bucket of Google Cloud Storage.
//
// A blob is created under the condition that its generation is 0 (DoesNotExist), so of several
// writers one wins; each carries a mark of its writer, by which one who lost the answer to a
// successful request finds out that the blob is its own.
package gcs

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"cloud.google.com/go/storage"
	"github.com/googleapis/gax-go/v2"
	"google.golang.org/api/googleapi"
	"google.golang.org/api/option"

	"github.com/rollout-rl/rollout/libs/blob"
)

// Config has the place of the bucket and the access to it.
type Config struct {
	Bucket   string
	Prefix   string // of every key, without slashes at its ends; "" is the whole bucket
	Endpoint string // URL of a server other than Google's, which is called without credentials
	// Credentials is a service account's key (JSON); "" takes Google's default credentials:
	// environment, gcloud, metadata server.
	Credentials string
	Access      string // where they come from, for people

	PartBytes int           // a blob above it is uploaded in chunks of that size; 0 is 16 MiB
	Idle      time.Duration // a connection that transfers nothing for so long is given up; 0: 30 s
}

const (
	defaultPart  = 16 << 20
	defaultIdle  = 30 * time.Second
	maxAttempts  = 8                // of one request
	chunkTries   = 30 * time.Second // how long to retry a chunk of an upload
	giveUp       = 75 * time.Second // an upload without progress, chunks tried again included
	chunkTimeout = 30 * time.Second // of one attempt
)

// Store is a blob.Store.
type Store struct {
	c      Config
	api    *storage.Client
	bucket *storage.BucketHandle
}

// Open returns a store. It sends no requests except those that find credentials. It returns
// blob.ErrDenied without credentials.
func Open(ctx context.Context, c Config) (*Store, error) {
	if c.PartBytes == 0 {
		c.PartBytes = defaultPart
	}
	if c.Idle == 0 {
		c.Idle = defaultIdle
	}
	c.Prefix = strings.Trim(c.Prefix, "/")
	options := []option.ClientOption{storage.WithJSONReads(), storage.WithDisabledClientMetrics()}
	switch {
	case c.Endpoint != "":
		options = append(options, option.WithEndpoint(strings.TrimSuffix(c.Endpoint, "/")+"/storage/v1/"), option.WithoutAuthentication())
	case c.Credentials != "":
		options = append(options, option.WithAuthCredentialsJSON(option.ServiceAccount, []byte(c.Credentials)))
	}
	api, err := storage.NewClient(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", c.Bucket, blob.ErrDenied.Wrap(err))
	}
	api.SetRetry(
		storage.WithBackoff(gax.Backoff{Initial: 50 * time.Millisecond, Max: 5 * time.Second, Multiplier: 2}),
		storage.WithMaxAttempts(maxAttempts), storage.WithErrorFunc(again),
	)
	return &Store{c: c, api: api, bucket: api.Bucket(c.Bucket)}, nil
}

// Close ends the client.
func (s *Store) Close() error { return s.api.Close() }

// again reports whether a request may succeed when it is sent once more.
func again(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	var answer *googleapi.Error
	if errors.As(err, &answer) {
		return storage.ShouldRetry(answer)
	}
	return err != nil // no answer: the connection failed
}

func (s *Store) object(key string) *storage.ObjectHandle { return s.bucket.Object(s.name(key)) }

func (s *Store) name(key string) string {
	if s.c.Prefix != "" {
		return s.c.Prefix + "/" + key
	}
	return key
}

func status(err error) int {
	var answer *googleapi.Error
	if errors.As(err, &answer) {
		return answer.Code
	}
	return 0
}

func (s *Store) place() blob.Place {
	return blob.Place{Endpoint: s.c.Endpoint, Bucket: s.c.Bucket, Access: s.c.Access}
}

// mapError turns the client's errors into the port's; context errors stay.
func (s *Store) mapError(op, key string, err error) error {
	switch code := status(err); {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
	case errors.Is(err, storage.ErrBucketNotExist):
		err = blob.ErrNoBucket.With("bucket", s.c.Bucket).Wrap(err)
	case errors.Is(err, storage.ErrObjectNotExist), code == http.StatusNotFound:
		err = blob.ErrNotFound
	case code == http.StatusPreconditionFailed:
		err = blob.ErrExists
	case code == http.StatusRequestedRangeNotSatisfiable:
		err = blob.ErrBadRange.With("key", key)
	case code == http.StatusForbidden, code == http.StatusUnauthorized:
		return s.place().Denied(op, key, fmt.Sprintf("HTTP %d", code))
	case code == 0, code == http.StatusTooManyRequests, code == http.StatusRequestTimeout, code >= http.StatusInternalServerError:
		return s.place().Silent(op, key, err)
	}
	return fmt.Errorf("%s blob %s: %w", op, key, err)
}
