package sqldb_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"

	"github.com/rollout-rl/rollout/libs/sqldb"
)

// listed returns the files of a folder.
func listed(t *testing.T, dir string) (names []string) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// copied copies those files of a database that exist, as a backup does.
func copied(t *testing.T, from string, suffixes ...string) (to string) {
	t.Helper()
	to = filepath.Join(t.TempDir(), "db.sqlite")
	for _, suffix := range suffixes {
		data, err := os.ReadFile(from + suffix)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to+suffix, data, 0o400); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

// A read-only database is complete, including rows that are only in the -wal file, and no files are
// created.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "db.sqlite")
	db := migrate(t, open(t, path))
	if err := db.Tx(t.Context(), insert(t.Context(), 7)); err != nil {
		t.Fatal(err)
	}
	read := func(path string) int {
		t.Helper()
		before := listed(t, filepath.Dir(path))
		db, err := sqldb.OpenReadOnly(path)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if err := db.Migrate(t.Context(), migrations); err != nil {
			t.Fatal(err)
		}
		n := count(t, db, "parent")
		if _, err := db.Exec(t.Context(), "DELETE FROM parent"); err == nil {
			t.Error("it was written to")
		}
		if after := listed(t, filepath.Dir(path)); len(after) != len(before) {
			t.Errorf("%v became %v", before, after)
		}
		return n
	}
	if n := read(path); n != 2 {
		t.Errorf("%d rows while another process writes", n)
	}
	if n := read(copied(t, path, "", "-wal", "-shm")); n != 2 {
		t.Errorf("%d rows of a copy with a -wal", n)
	}
	if _, err := sqldb.OpenReadOnly(copied(t, path, "", "-wal")); !errors.Is(err, sqldb.ErrUnread) {
		t.Errorf("a copy without its -shm: %v", err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if n := read(path); n != 2 {
		t.Errorf("%d rows after a clean end", n)
	}
	newer := fstest.MapFS{"sqlite/00003_more.sql": &fstest.MapFile{}}
	older := fstest.MapFS{"sqlite/00001_init.sql": &fstest.MapFile{}}
	for want, known := range map[error]fs.FS{sqldb.ErrOlder: newer, sqldb.ErrNewer: older} {
		db, err := sqldb.OpenReadOnly(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := db.Migrate(t.Context(), known); !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
		db.Close()
	}
}

// A folder that may not be written is read all the same.
func TestArchiveOfAnotherUser(t *testing.T) {
	t.Parallel()
	if os.Getuid() == 0 {
		t.Skip("root may write everywhere")
	}
	dir := t.TempDir()
	if err := migrate(t, open(t, filepath.Join(dir, "db.sqlite"))).Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o500); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.Chmod(dir, 0o700) }()
	if db, err := sqldb.Ready(t.Context(), sqldb.Files(dir), "db", sqldb.Full, migrations); err == nil {
		db.Close()
		t.Error("it can be written")
	}
	db, err := sqldb.Ready(t.Context(), sqldb.Archive(dir), "db", sqldb.Full, migrations)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if count(t, db, "parent") != 1 {
		t.Error("a row is missing")
	}
}
