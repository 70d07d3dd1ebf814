package sqldb_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

func open(t *testing.T, path string) *sqldb.DB {
	t.Helper()
	dir, name := filepath.Split(path)
	return sqldbtest.Open(t, sqldb.Files(dir), strings.TrimSuffix(name, ".sqlite"))
}

var migrations = fstest.MapFS{}

func init() {
	for dialect, strict := range map[string]string{"sqlite": " STRICT", "postgres": ""} {
		migrations[dialect+"/00001_init.sql"] = &fstest.MapFile{Data: []byte(`-- +goose Up
CREATE TABLE parent (id INTEGER PRIMARY KEY)` + strict + `;
CREATE TABLE child (id INTEGER PRIMARY KEY, parent INTEGER NOT NULL REFERENCES parent (id))` + strict + `;
-- +goose Down
DROP TABLE child;
DROP TABLE parent;
`)}
		migrations[dialect+"/00002_seed.sql"] = &fstest.MapFile{Data: []byte("-- +goose Up\nINSERT INTO parent (id) VALUES (1);\n-- +goose Down\nDELETE FROM parent;\n")}
	}
}

func migrate(t *testing.T, db *sqldb.DB) *sqldb.DB {
	t.Helper()
	if err := db.Migrate(t.Context(), migrations); err != nil {
		t.Fatal(err)
	}
	return db
}

func count(t *testing.T, db *sqldb.DB, table string) (n int) {
	t.Helper()
	if err := db.One(t.Context(), "SELECT count(*) FROM "+table, nil, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

func insert(ctx context.Context, id int) func(tx *sql.Tx) error {
	return func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO parent (id) VALUES ($1)", id)
		return err
	}
}

func TestSuite(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		for name, test := range map[string]func(*testing.T, sqldb.Place){
			"Tx": transaction, "MigrateTwiceAtOnce": migrateTwice, "BrokenMigration": brokenMigration, "NewerDatabase": newer,
			"ReadersDoNotWait": readersDoNotWait, "UpdatesTakeTurns": updatesTakeTurns, "Fence": fence, "Among": among, "ForeignKeys": foreignKeys,
		} {
			t.Run(name, func(t *testing.T) { t.Parallel(); test(t, place(t)) })
		}
	})
}

func transaction(t *testing.T, place sqldb.Place) {
	db := migrate(t, sqldbtest.Open(t, place, "x"))
	if err := db.Tx(t.Context(), insert(t.Context(), 2)); err != nil {
		t.Fatal(err)
	}
	boom := errors.New("boom")
	if err := db.Tx(t.Context(), func(tx *sql.Tx) error { return errors.Join(insert(t.Context(), 3)(tx), boom) }); !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
	func() {
		defer func() { _ = recover() }()
		_ = db.Tx(t.Context(), func(tx *sql.Tx) error { _ = insert(t.Context(), 4)(tx); panic("x") })
	}()
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := db.Tx(canceled, insert(canceled, 5)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if n := count(t, db, "parent"); n != 2 {
		t.Errorf("%d rows, want the seed and one", n)
	}
	if n, err := db.Exec(t.Context(), "UPDATE parent SET id = id + 100"); err != nil || n != 2 {
		t.Errorf("changed %d rows: %v", n, err)
	}
	var id int
	if err := db.One(t.Context(), "SELECT id FROM parent WHERE id = $1", []any{999}, &id); !errors.Is(err, sql.ErrNoRows) {
		t.Errorf("a row that is not there: %v", err)
	}
}

func migrateTwice(t *testing.T, place sqldb.Place) {
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		wg.Go(func() { // with its own pools, as another process has
			db, err := place.Open(t.Context(), "x", sqldb.Full)
			if err != nil {
				errs[i] = err
				return
			}
			errs[i] = errors.Join(db.Migrate(t.Context(), migrations), db.Close())
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if n := count(t, sqldbtest.Open(t, place, "x"), "parent"); n != 1 {
		t.Errorf("the seed ran %d times", n)
	}
}

func with(name, text string) fstest.MapFS {
	more := fstest.MapFS{}
	for k, v := range migrations {
		more[k] = v
	}
	for _, dialect := range []string{"sqlite", "postgres"} {
		more[dialect+"/"+name] = &fstest.MapFile{Data: []byte(text)}
	}
	return more
}

func brokenMigration(t *testing.T, place sqldb.Place) {
	db := migrate(t, sqldbtest.Open(t, place, "x"))
	if err := db.Migrate(t.Context(), with("00003_bad.sql", "-- +goose Up\nINSERT INTO parent (id) VALUES (2);\nCREATE NONSENSE;\n")); err == nil {
		t.Fatal("no error")
	}
	if n := count(t, db, "parent"); n != 1 {
		t.Errorf("half of the migration stayed: %d rows", n)
	}
}

func newer(t *testing.T, place sqldb.Place) {
	db := migrate(t, sqldbtest.Open(t, place, "x"))
	if err := db.Migrate(t.Context(), with("00003_more.sql", "-- +goose Up\nINSERT INTO parent (id) VALUES (2);\n")); err != nil {
		t.Fatal(err)
	}
	if err := db.Migrate(t.Context(), migrations); !errors.Is(err, sqldb.ErrNewer) {
		t.Errorf("an older program on it: %v", err)
	}
}

func readersDoNotWait(t *testing.T, place sqldb.Place) {
	db := migrate(t, sqldbtest.Open(t, place, "x"))
	err := db.Tx(t.Context(), func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(t.Context(), "DELETE FROM parent"); err != nil {
			return err
		}
		if n := count(t, db, "parent"); n != 1 { // while the writer holds its lock
			return fmt.Errorf("a reader sees %d rows, want 1", n)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	err = db.View(t.Context(), func(tx *sql.Tx) error {
		var before, after int
		if err := tx.QueryRowContext(t.Context(), "SELECT count(*) FROM parent").Scan(&before); err != nil {
			return err
		}
		if err := db.Tx(t.Context(), insert(t.Context(), 7)); err != nil {
			return err
		}
		if err := tx.QueryRowContext(t.Context(), "SELECT count(*) FROM parent").Scan(&after); err != nil || before != after {
			return fmt.Errorf("a view saw %d rows, then %d: %w", before, after, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	err = db.View(t.Context(), func(tx *sql.Tx) error {
		_, err := tx.ExecContext(t.Context(), "DELETE FROM parent")
		return err
	})
	if err == nil || count(t, db, "parent") != 1 {
		t.Errorf("a view wrote: %v", err)
	}
}

func updatesTakeTurns(t *testing.T, place sqldb.Place) {
	db := migrate(t, sqldbtest.Open(t, place, "x"))
	other := sqldbtest.Open(t, place, "x")
	var wg sync.WaitGroup
	for _, d := range []*sqldb.DB{db, other} {
		for range 20 {
			wg.Go(func() {
				err := d.Tx(t.Context(), func(tx *sql.Tx) error {
					var n int
					if err := tx.QueryRowContext(t.Context(), "SELECT id FROM parent"+d.ForUpdate()).Scan(&n); err != nil {
						return err
					}
					_, err := tx.ExecContext(t.Context(), "UPDATE parent SET id = $1", n+1)
					return err
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	var n int
	if err := db.One(t.Context(), "SELECT id FROM parent", nil, &n); err != nil || n != 41 {
		t.Errorf("counted to %d, want 41: %v", n, err)
	}
}

func fence(t *testing.T, place sqldb.Place) {
	db := migrate(t, sqldbtest.Open(t, place, "x"))
	old := errors.New("an old leader")
	fenced := db.Fenced(func(context.Context, *sql.Tx) error { return old })
	if err := fenced.Tx(t.Context(), insert(t.Context(), 2)); !errors.Is(err, old) {
		t.Errorf("transaction: %v", err)
	}
	if _, err := fenced.Exec(t.Context(), "DELETE FROM parent"); !errors.Is(err, old) {
		t.Errorf("statement: %v", err)
	}
	if n := count(t, fenced, "parent"); n != 1 {
		t.Errorf("%d rows, want the seed", n)
	}
	if err := db.Tx(t.Context(), insert(t.Context(), 2)); err != nil {
		t.Errorf("the one without a fence: %v", err)
	}
}

func among(t *testing.T, place sqldb.Place) {
	db := migrate(t, sqldbtest.Open(t, place, "x"))
	for i := 2; i < 6; i++ {
		if err := db.Tx(t.Context(), insert(t.Context(), i)); err != nil {
			t.Fatal(err)
		}
	}
	var got []int
	err := db.Each(t.Context(), "SELECT id FROM parent WHERE id > $1 AND id "+db.Among(2)+" ORDER BY id", []any{1, "[1,3,5,9]"}, func(scan sqldb.Scan) error {
		got = append(got, 0)
		return scan(&got[len(got)-1])
	})
	if err != nil || !slices.Equal(got, []int{3, 5}) {
		t.Errorf("%v %v", got, err)
	}
}

func foreignKeys(t *testing.T, place sqldb.Place) {
	db := migrate(t, sqldbtest.Open(t, place, "x"))
	if _, err := db.Exec(t.Context(), "INSERT INTO child (id, parent) VALUES (1, 77)"); err == nil {
		t.Error("a foreign key was not enforced")
	}
}

func TestSQLiteSettings(t *testing.T) {
	t.Parallel()
	db := open(t, filepath.Join(t.TempDir(), "new folder?", "x.sqlite"))
	for pragma, want := range map[string]string{"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1", "busy_timeout": "10000"} {
		var got string
		if err := db.One(t.Context(), "PRAGMA "+pragma, nil, &got); err != nil || got != want {
			t.Errorf("%s = %s, want %s (%v)", pragma, got, want, err)
		}
	}
}

func TestSQLiteMigrateWaitsForItsTurn(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x.sqlite")
	db := open(t, path)
	f, err := os.Create(path + ".migrate")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil { // as another process that migrates
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := db.Migrate(ctx, migrations); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("while another migrates: %v", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	migrate(t, db)
}
