//go:build servers

package s3_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/blobtest"
	"github.com/rollout-rl/rollout/libs/blob/s3"
	"github.com/rollout-rl/rollout/libs/servertest"
)

// server is one S3 server with a bucket; each store gets its own prefix.
type server struct {
	*servertest.S3
	stores atomic.Int64
}

const bucket = "blobs"

func start(t *testing.T) *server {
	t.Helper()
	s := &server{S3: servertest.StartS3(t)}
	api := awss3.New(awss3.Options{
		Region: "us-east-1", Credentials: credentials.NewStaticCredentialsProvider(s.AccessKey, s.SecretKey, ""), UsePathStyle: true,
		BaseEndpoint: aws.String(s.Endpoint),
	})
	if _, err := api.CreateBucket(t.Context(), &awss3.CreateBucketInput{Bucket: aws.String(bucket)}); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *server) config(endpoint string) s3.Config {
	return s3.Config{
		Bucket: bucket, Prefix: fmt.Sprintf("store-%d", s.stores.Add(1)), Endpoint: endpoint, AccessKey: s.AccessKey, SecretKey: s.SecretKey,
		PartBytes: 5 << 20, Idle: 400 * time.Millisecond,
	}
}

func open(t *testing.T, c s3.Config) blob.Store {
	t.Helper()
	store, err := s3.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func TestS3(t *testing.T) {
	t.Parallel()
	s := start(t)
	t.Run("Suite", func(t *testing.T) {
		blobtest.Run(t, func(t *testing.T) blob.Store {
			c := s.config(s.Endpoint)
			c.Idle = 30 * time.Second
			return open(t, c)
		})
	})
	t.Run("Network", func(t *testing.T) {
		blobtest.RunNetwork(t, blobtest.Network{Server: s.Endpoint, Open: func(t *testing.T, endpoint string) blob.Store {
			return open(t, s.config(endpoint))
		}})
	})
	t.Run("Refusals", func(t *testing.T) { refusals(t, s) })
}

func refusals(t *testing.T, s *server) {
	wrong := s.config(s.Endpoint)
	wrong.SecretKey = "wrong"
	unknown := s.config(s.Endpoint)
	unknown.AccessKey = "unknown" // this server's answer is a 404
	missing := s.config(s.Endpoint)
	missing.Bucket = "missing"
	gone := s.config("http://127.0.0.1:1")
	for _, c := range []struct {
		config s3.Config
		want   error
	}{{wrong, blob.ErrDenied}, {unknown, blob.ErrDenied}, {missing, blob.ErrNoBucket}, {gone, blob.ErrUnavailable}} {
		store := open(t, c.config)
		if _, err := store.Put(t.Context(), "k", strings.NewReader("x")); !errors.Is(err, c.want) {
			t.Errorf("put: %v, want %v", err, c.want)
		}
		for _, err := range store.List(t.Context(), "") {
			if !errors.Is(err, c.want) {
				t.Errorf("list: %v, want %v", err, c.want)
			}
		}
	}
}
