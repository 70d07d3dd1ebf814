package sqldb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/pressly/goose/v3"
)

// Archive is Files that no process writes any more. Writable files are opened as Files are; others,
// as on a read-only mount or for another user, are opened read-only, and no files are created next
// to them.
type Archive string

// Open implements Place.
func (a Archive) Open(ctx context.Context, service string, d Durability) (*DB, error) {
	path := filepath.Join(string(a), service+".sqlite")
	if writable(path) {
		return Files(a).Open(ctx, service, d)
	}
	return OpenReadOnly(path)
}

// writable reports whether SQLite may change a database: the file, its -wal and -shm files, and
// their folder.
func writable(path string) bool {
	const write = 2 // W_OK
	for _, file := range []string{path, path + "-wal", path + "-shm", path + ".migrate"} {
		if err := syscall.Access(file, write); err != nil && !errors.Is(err, os.ErrNotExist) {
			return false
		}
	}
	err := syscall.Access(filepath.Dir(path), write)
	return err == nil || errors.Is(err, os.ErrNotExist)
}

// OpenReadOnly opens a database file without writing. SQLite needs the -shm file for that, if the
// -wal file has changes. It returns ErrUnread.
func OpenReadOnly(path string) (*DB, error) {
	for _, file := range []string{path, path + "-wal", path + "-shm"} {
		if f, err := os.Open(file); err == nil {
			f.Close()
		} else if file == path || !errors.Is(err, os.ErrNotExist) {
			return nil, ErrUnread.WithMessage("the database can't be read").Wrap(err)
		}
	}
	wal, err := os.Stat(path + "-wal")
	_, noShm := os.Stat(path + "-shm")
	q := url.Values{"mode": {"ro"}, "_pragma": {"busy_timeout(10000)", "query_only(1)", "temp_store(MEMORY)"}, "_time_format": {"sqlite"}}
	switch {
	case err == nil && wal.Size() > 0 && noShm != nil:
		return nil, ErrUnread.WithMessage("the last changes of %s stand in %s, which can't be read where nothing can be written", path, wal.Name())
	case err != nil || noShm != nil: // everything is in the file, and no process has it open
		q.Set("immutable", "1")
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	dsn := url.URL{Scheme: "file", Path: abs, RawQuery: q.Encode()}
	db, err := sql.Open("sqlite", dsn.String())
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", path, err)
	}
	db.SetMaxOpenConns(max(2, runtime.GOMAXPROCS(0)))
	return &DB{write: db, read: db, path: path, readOnly: true}, nil
}

// current compares the schema of a read-only database with the migrations. It returns ErrOlder or
// ErrNewer.
func (db *DB) current(ctx context.Context, fsys fs.FS) error {
	names, err := fs.Glob(fsys, "sqlite/*.sql")
	if err != nil || len(names) == 0 {
		return fmt.Errorf("read migrations of sqlite: %w", errors.Join(err, os.ErrNotExist))
	}
	newest, err := goose.NumericComponent(names[len(names)-1])
	if err != nil {
		return fmt.Errorf("read migrations of sqlite: %w", err)
	}
	var has int64
	err = db.One(ctx, "SELECT coalesce(max(version_id), 0) FROM goose_db_version WHERE is_applied", nil, &has)
	if err != nil && !strings.Contains(err.Error(), "no such table") {
		if err := whole(err, db.path); errors.Is(err, ErrDamaged) {
			return err
		}
		return ErrUnread.WithMessage("%s can't be read", db.path).Wrap(err)
	}
	switch {
	case has > newest:
		return ErrNewer.With("has", strconv.FormatInt(has, 10)).With("knows", strconv.FormatInt(newest, 10))
	case has < newest:
		return ErrOlder.WithMessage("%s is of an older rolloutd (schema %d, this one reads %d), and can't be brought up to date where nothing can be written",
			db.path, has, newest)
	}
	return nil
}

// Whole reads every page of a SQLite file. It returns ErrDamaged if the file is truncated, has
// damaged pages, or is not a database, and ctx's error if ctx ends first.
func (db *DB) Whole(ctx context.Context) error {
	var found string
	err := db.One(ctx, "PRAGMA quick_check(1)", nil, &found)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err == nil && found != "ok" {
		return damaged(db.path, errors.New(strings.Join(strings.Fields(found), " ")))
	}
	return whole(err, db.path)
}
