package sqlstore_test

import (
	"testing"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	"github.com/rollout-rl/rollout/services/controller"
	"github.com/rollout-rl/rollout/services/controller/sqlstore"
	"github.com/rollout-rl/rollout/services/controller/storetest"
)

func open(t *testing.T, place sqldb.Place) *sqlstore.Store {
	t.Helper()
	s, err := sqlstore.Open(t.Context(), place)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestSuite(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		storetest.Run(t, func(t *testing.T) (controller.Store, func() controller.Store) {
			p := place(t)
			store := open(t, p)
			return store, func() controller.Store {
				if err := store.Close(); err != nil {
					t.Fatal(err)
				}
				return open(t, p)
			}
		})
	})
}
