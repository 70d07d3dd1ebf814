package sqlstore_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	"github.com/rollout-rl/rollout/services/snapshot"
	"github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	"github.com/rollout-rl/rollout/services/snapshot/storetest"
)

func TestSuite(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		storetest.Run(t, func(t *testing.T) snapshot.Store { return sqldbtest.Store(t, place(t), sqlstore.Open) })
	})
}

func TestAnotherProcessFindsWhatWasWritten(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		p := place(t)
		want := storetest.Snap("snap-1", "run-a", 1, "a")
		if _, err := sqldbtest.Store(t, p, sqlstore.Open).Record(t.Context(), want, nil); err != nil {
			t.Fatal(err)
		}
		got, err := sqldbtest.Store(t, p, sqlstore.Open).Get(t.Context(), "snap-1")
		if err != nil || !proto.Equal(got, want) {
			t.Fatalf("got %v, %v", got, err)
		}
	})
}
