package sqlstore_test

import (
	"testing"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	"github.com/rollout-rl/rollout/services/gateway"
	"github.com/rollout-rl/rollout/services/gateway/sqlstore"
	"github.com/rollout-rl/rollout/services/gateway/storetest"
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
		storetest.Run(t, func(t *testing.T) gateway.Store { return open(t, place(t)) })
	})
}
