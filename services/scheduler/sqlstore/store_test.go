package sqlstore_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	"github.com/rollout-rl/rollout/services/scheduler/storetest"
)

func TestSuite(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		storetest.Run(t, func(t *testing.T) scheduler.Store { return sqldbtest.Store(t, place(t), sqlstore.Open) })
	})
}

func TestWritesAreVisibleToAnotherProcess(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		p := place(t)
		first := sqldbtest.Store(t, p, sqlstore.Open)
		want, err := first.Create(t.Context(), storetest.Sample("run-1", "a", scheduler.Pending), "", scheduler.Cursor{})
		if err != nil {
			t.Fatal(err)
		}
		if err := first.Advance(t.Context(), "run-1", 0, 7); err != nil {
			t.Fatal(err)
		}
		second := sqldbtest.Store(t, p, sqlstore.Open)
		if got, err := second.Get(t.Context(), "run-1"); err != nil || !proto.Equal(got, want) {
			t.Fatalf("got %v, %v", got, err)
		}
		if got, err := second.Cursor(t.Context(), "run-1"); err != nil || got.Position != 7 {
			t.Fatalf("cursor %+v, %v", got, err)
		}
	})
}
