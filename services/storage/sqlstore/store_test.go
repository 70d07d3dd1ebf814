package sqlstore_test

import (
	"testing"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	"github.com/rollout-rl/rollout/services/storage"
	"github.com/rollout-rl/rollout/services/storage/sqlstore"
	"github.com/rollout-rl/rollout/services/storage/storetest"
)

func TestSuite(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		storetest.Run(t, func(t *testing.T) storage.Store { return sqldbtest.Store(t, place(t), sqlstore.Open) })
	})
}
