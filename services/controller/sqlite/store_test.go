package sqlite_test

import (
	"path/filepath"
	"testing"

	"github.com/rollout-rl/rollout/services/controller"
	"github.com/rollout-rl/rollout/services/controller/sqlite"
	"github.com/rollout-rl/rollout/services/controller/storetest"
)

func TestStore(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) (controller.Store, func() controller.Store) {
		path := filepath.Join(t.TempDir(), "controller.sqlite")
		open := func() *sqlite.Store {
			store, err := sqlite.Open(t.Context(), path)
			if err != nil {
				t.Fatal(err)
			}
			return store
		}
		store := open()
		t.Cleanup(func() { _ = store.Close() })
		return store, func() controller.Store {
			if err := store.Close(); err != nil {
				t.Fatal(err)
			}
			store = open()
			return store
		}
	})
}
