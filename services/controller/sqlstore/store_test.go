package sqlstore_test

import (
	"errors"
	"testing"

	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	"github.com/rollout-rl/rollout/services/controller"
	"github.com/rollout-rl/rollout/services/controller/sqlstore"
	"github.com/rollout-rl/rollout/services/controller/storetest"
)

func TestSuite(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		storetest.Run(t, func(t *testing.T) (controller.Store, func() controller.Store) {
			p := place(t)
			store := sqldbtest.Store(t, p, sqlstore.Open)
			return store, func() controller.Store {
				if err := store.Close(); err != nil {
					t.Fatal(err)
				}
				return sqldbtest.Store(t, p, sqlstore.Open)
			}
		})
	})
}

// A controller whose lease was taken saves nothing any more.
func TestFenced(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		store := sqldbtest.Store(t, place(t), sqlstore.Open)
		table := store.Lease()
		mine, err := table.Take(t.Context(), lease.Lease{}, "a", "")
		if err != nil {
			t.Fatal(err)
		}
		fenced := store.Fenced(table.Fence(mine.Epoch))
		drive := &controller.Drive{Spec: &learnerv1.StartRunRequest{RunId: "run-a"}, Active: true}
		if err := fenced.Save(t.Context(), drive, fencetest.Controller(1, 1)); err != nil {
			t.Fatal(err)
		}
		if _, err := table.Take(t.Context(), mine, "b", ""); err != nil {
			t.Fatal(err)
		}
		drive.Step = 9
		if err := fenced.Save(t.Context(), drive, fencetest.Controller(1, 1)); !errors.Is(err, lease.ErrFenced) {
			t.Errorf("got %v", err)
		}
		if kept, err := fenced.Get(t.Context(), "run-a"); err != nil || kept.Step != 0 {
			t.Errorf("kept %+v, %v", kept, err)
		}
	})
}
