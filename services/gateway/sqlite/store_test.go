package sqlite_test

import (
	"path/filepath"
	"testing"

	"github.com/rollout-rl/rollout/services/gateway"
	"github.com/rollout-rl/rollout/services/gateway/sqlite"
	"github.com/rollout-rl/rollout/services/gateway/storetest"
)

func TestStore(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) gateway.Store {
		store, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "gateway.sqlite"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = store.Close() })
		return store
	})
}
