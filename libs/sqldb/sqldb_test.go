package sqldb_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rollout-rl/rollout/libs/sqldb"
)

func open(t *testing.T, path string) *sqldb.SQLite {
	t.Helper()
	db, err := sqldb.OpenSQLite(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

var migrations = fstest.MapFS{
	"sqlite/00001_init.sql": {Data: []byte(`-- +goose Up
CREATE TABLE parent (id INTEGER PRIMARY KEY) STRICT;
CREATE TABLE child (id INTEGER PRIMARY KEY, parent INTEGER NOT NULL REFERENCES parent (id)) STRICT;
-- +goose Down
DROP TABLE child;
DROP TABLE parent;
`)},
	"sqlite/00002_seed.sql": {Data: []byte("-- +goose Up\nINSERT INTO parent (id) VALUES (1);\n-- +goose Down\nDELETE FROM parent;\n")},
}

func migrated(t *testing.T) *sqldb.SQLite {
	t.Helper()
	db := open(t, filepath.Join(t.TempDir(), "new folder?", "x.sqlite"))
	if err := sqldb.Migrate(t.Context(), db.DB, migrations, "sqlite"); err != nil {
		t.Fatal(err)
	}
	return db
}

func count(t *testing.T, db *sql.DB, table string) (n int) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM "+table).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestSettings(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	for pragma, want := range map[string]string{"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1", "busy_timeout": "10000"} {
		var got string
		if err := db.QueryRowContext(t.Context(), "PRAGMA "+pragma).Scan(&got); err != nil || got != want {
			t.Errorf("%s = %s, want %s (%v)", pragma, got, want, err)
		}
	}
	if _, err := db.ExecContext(t.Context(), "INSERT INTO child (parent) VALUES (77)"); err == nil {
		t.Error("a foreign key was not enforced")
	}
	if _, err := db.Read.ExecContext(t.Context(), "INSERT INTO parent (id) VALUES (9)"); err == nil {
		t.Error("the reading pool wrote")
	}
}

func TestMigrateTwiceAtOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x.sqlite")
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		db := open(t, path) // its own pools, as another process has
		wg.Go(func() { errs[i] = sqldb.Migrate(t.Context(), db.DB, migrations, "sqlite") })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if n := count(t, open(t, path).Read, "parent"); n != 1 {
		t.Errorf("the seed ran %d times", n)
	}
}

func TestMigrateReportsABrokenMigration(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	more := fstest.MapFS{"sqlite/00003_bad.sql": {Data: []byte("-- +goose Up\nINSERT INTO parent (id) VALUES (2);\nCREATE NONSENSE;\n")}}
	for k, v := range migrations {
		more[k] = v
	}
	if err := sqldb.Migrate(t.Context(), db.DB, more, "sqlite"); err == nil {
		t.Fatal("no error")
	}
	if n := count(t, db.DB, "parent"); n != 1 {
		t.Errorf("half of the migration stayed: %d rows", n)
	}
}

func TestTx(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	insert := func(tx *sql.Tx) error {
		_, err := tx.ExecContext(t.Context(), "INSERT INTO parent DEFAULT VALUES")
		return err
	}
	if err := sqldb.Tx(t.Context(), db, insert); err != nil {
		t.Fatal(err)
	}
	boom := errors.New("boom")
	if err := sqldb.Tx(t.Context(), db, func(tx *sql.Tx) error { return errors.Join(insert(tx), boom) }); !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
	func() {
		defer func() { _ = recover() }()
		_ = sqldb.Tx(t.Context(), db, func(tx *sql.Tx) error { _ = insert(tx); panic("x") })
	}()
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := sqldb.Tx(canceled, db, insert); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if n := count(t, db.Read, "parent"); n != 2 {
		t.Errorf("%d rows, want the seed and one", n)
	}
}

func TestWritersTakeTurnsAndReadersDoNotWait(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	other := open(t, filePath(t, db))
	var wg sync.WaitGroup
	for _, d := range []*sqldb.SQLite{db, other} {
		for range 20 {
			wg.Go(func() {
				err := sqldb.Tx(t.Context(), d, func(tx *sql.Tx) error {
					var n int
					if err := tx.QueryRowContext(t.Context(), "SELECT max(id) FROM parent").Scan(&n); err != nil {
						return err
					}
					_, err := tx.ExecContext(t.Context(), "INSERT INTO parent (id) VALUES (?)", n+1)
					return err
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	err := sqldb.Tx(t.Context(), db, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(t.Context(), "DELETE FROM parent"); err != nil {
			return err
		}
		if n := count(t, db.Read, "parent"); n != 41 { // while the writer holds its lock
			return fmt.Errorf("a reader sees %d rows, want 41", n)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func filePath(t *testing.T, db *sqldb.SQLite) (path string) {
	t.Helper()
	var seq int
	var name string
	if err := db.QueryRowContext(t.Context(), "PRAGMA database_list").Scan(&seq, &name, &path); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestMigrateWaitsForItsTurn(t *testing.T) {
	t.Parallel()
	db := open(t, filepath.Join(t.TempDir(), "x.sqlite"))
	f, err := os.Create(filePath(t, db) + ".migrate")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil { // as another process that migrates
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := sqldb.Migrate(ctx, db.DB, migrations, "sqlite"); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("while another migrates: %v", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if err := sqldb.Migrate(t.Context(), db.DB, migrations, "sqlite"); err != nil {
		t.Error(err)
	}
}
