//go:build servers

package gcs_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/blobtest"
	"github.com/rollout-rl/rollout/libs/blob/gcs"
	"github.com/rollout-rl/rollout/libs/servertest"
)

const bucket = "blobs"

func open(t *testing.T, c gcs.Config) blob.Store {
	t.Helper()
	store, err := gcs.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store
}

func TestGCS(t *testing.T) {
	t.Parallel()
	server := servertest.StartGCS(t, bucket)
	var stores atomic.Int64
	config := func(endpoint string, idle time.Duration) gcs.Config {
		return gcs.Config{Bucket: bucket, Prefix: fmt.Sprintf("store-%d", stores.Add(1)), Endpoint: endpoint, PartBytes: 4 << 20, Idle: idle}
	}
	t.Run("Suite", func(t *testing.T) {
		blobtest.Run(t, func(t *testing.T) blob.Store { return open(t, config(server.Endpoint, 30*time.Second)) })
	})
	t.Run("Network", func(t *testing.T) {
		blobtest.RunNetwork(t, blobtest.Network{Server: server.Endpoint, Open: func(t *testing.T, endpoint string) blob.Store {
			return open(t, config(endpoint, 400*time.Millisecond))
		}})
	})
	t.Run("Refusals", func(t *testing.T) {
		missing, gone := config(server.Endpoint, time.Second), config("http://127.0.0.1:1", time.Second)
		missing.Bucket = "missing"
		if _, err := open(t, gone).Put(t.Context(), "k", strings.NewReader("x")); !errors.Is(err, blob.ErrUnavailable) {
			t.Errorf("no server: %v", err)
		}
		for _, err := range open(t, missing).List(t.Context(), "") {
			if !errors.Is(err, blob.ErrNoBucket) {
				t.Errorf("list of a missing bucket: %v", err)
			}
		}
	})
}
