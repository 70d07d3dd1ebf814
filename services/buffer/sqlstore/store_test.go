package sqlstore_test

import (
	"sync"
	"testing"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/sqlstore"
	"github.com/rollout-rl/rollout/services/buffer/storetest"
)

func TestSuite(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		var mu sync.Mutex
		places := map[string]sqldb.Place{}
		storetest.Run(t, func(t *testing.T, folder string) ledger.Store {
			mu.Lock()
			defer mu.Unlock()
			if places[folder] == nil {
				places[folder] = place(t)
			}
			return sqldbtest.Store(t, places[folder], sqlstore.Open)
		})
	})
}
