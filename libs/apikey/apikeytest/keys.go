// Package apikeytest has API keys for tests, without a database.
package apikeytest

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/apikey"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
)

// Keys is keys in memory and a ring that reads them until the test ends.
type Keys struct {
	Ring *apikey.Ring

	mu       sync.Mutex
	list     []*apikey.Record
	revision int64
	used     []*keyv1.ApiKeyUse
	failure  error
}

// New returns no keys.
func New(t *testing.T) *Keys {
	t.Helper()
	k := &Keys{}
	k.Ring = apikey.NewRing(k.sync, nil)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = k.Ring.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return k
}

// Create returns a new key that was created at a time.
func (k *Keys) Create(t *testing.T, r *apikey.Record, at time.Time) (key string) {
	t.Helper()
	key, err := apikey.New(r, at)
	if err != nil {
		t.Fatal(err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.list = append(k.list, r)
	k.revision++
	return key
}

// Revoke removes a key.
func (k *Keys) Revoke(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.list = slices.DeleteFunc(slices.Clone(k.list), func(r *apikey.Record) bool { return r.GetName() == name })
	k.revision++
}

// Fail makes all reads fail; nil: none.
func (k *Keys) Fail(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.failure = err
}

// Used returns the reported uses.
func (k *Keys) Used() []*keyv1.ApiKeyUse {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.used)
}

func (k *Keys) sync(_ context.Context, req *keyv1.SyncApiKeysRequest) (*keyv1.SyncApiKeysResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failure != nil {
		return nil, k.failure
	}
	k.used = append(k.used, req.GetUsed()...)
	resp := &keyv1.SyncApiKeysResponse{Revision: k.revision}
	if req.GetRevision() != k.revision {
		resp.Keys = slices.Clone(k.list)
	}
	return resp, nil
}
