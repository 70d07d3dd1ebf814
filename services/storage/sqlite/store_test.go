package sqlite_test

import (
	"path/filepath"
	"testing"

	"github.com/rollout-rl/rollout/services/storage"
	"github.com/rollout-rl/rollout/services/storage/sqlite"
	"github.com/rollout-rl/rollout/services/storage/storetest"
)

func TestStore(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) storage.Store {
		store, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "storage.sqlite"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = store.Close() })
		return store
	})
}
