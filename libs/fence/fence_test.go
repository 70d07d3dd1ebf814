package fence_test

import (
	"database/sql"
	"errors"
	"os"
	"testing"
	"testing/fstest"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

// open is a database with the tables of fences, as services have them.
func open(t *testing.T, place sqldb.Place) *sqldb.DB {
	t.Helper()
	db := sqldbtest.Open(t, place, "x")
	migrations := fstest.MapFS{}
	for _, dialect := range []string{"sqlite", "postgres"} {
		for to, from := range map[string]string{"00001_fence.sql": "00003_fence.sql", "00002_deleted_run.sql": "00005_deleted_run.sql"} {
			text, err := os.ReadFile("../../database/storage/" + dialect + "/" + from)
			if err != nil {
				t.Fatal(err)
			}
			migrations[dialect+"/"+to] = &fstest.MapFile{Data: text}
		}
	}
	if err := db.Migrate(t.Context(), migrations); err != nil {
		t.Fatal(err)
	}
	return db
}

// What arrives for a deleted run is refused for a month, and then the next deletion forgets the
// run.
func TestDeletedRunsAreForgotten(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		db := open(t, place(t))
		run := func(fn func(tx *sql.Tx) error) error { return db.Tx(t.Context(), fn) }
		live := func(name string) error {
			return run(func(tx *sql.Tx) error { return fence.Live(t.Context(), tx, db.Dialect, name) })
		}
		bury := func(name string) {
			if err := run(func(tx *sql.Tx) error { return fence.Bury(t.Context(), tx, db.Dialect, name) }); err != nil {
				t.Fatal(err)
			}
		}
		later := func(days int) { // time passes
			if _, err := db.Exec(t.Context(), "UPDATE fence_deleted SET expires = expires - $1", days*24*3600); err != nil {
				t.Fatal(err)
			}
		}
		bury("run-a")
		later(29)
		bury("run-b")
		for _, name := range []string{"run-a", "run-b"} {
			if err := live(name); !errors.Is(err, fence.ErrDeleted) {
				t.Errorf("%s: %v", name, err)
			}
		}
		later(2)
		bury("run-c")
		if err := live("run-a"); err != nil {
			t.Errorf("after a month: %v", err)
		}
		var kept int
		if err := db.One(t.Context(), "SELECT count(*) FROM fence_deleted", nil, &kept); err != nil || kept != 2 {
			t.Errorf("%d rows, %v; want 2", kept, err)
		}
	})
}
