package sqldb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pressly/goose/v3"
)

// Ready opens or makes the database of a service and brings its schema up to date.
func Ready(ctx context.Context, place Place, service string, d Durability, migrations fs.FS) (*DB, error) {
	db, err := place.Open(ctx, service, d)
	if err != nil {
		return nil, err
	}
	if err := db.Migrate(ctx, migrations); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// Migrate applies the goose migrations (NNNNN_name.sql) that the database lacks, each in its
// transaction: those of the folder sqlite or postgres of fsys. Processes that start together take
// turns, by a lock file for SQLite and by an advisory lock of PostgreSQL; ctx bounds the wait. A
// database that is only read must be up to date. ErrNewer, ErrOlder.
func (db *DB) Migrate(ctx context.Context, fsys fs.FS) error {
	if db.Postgres() {
		return db.postgres.locked(ctx, func(*pgx.Conn) error { return db.migrate(ctx, goose.DialectPostgres, fsys, "postgres") })
	}
	if db.readOnly {
		return db.current(ctx, fsys)
	}
	unlock, err := lockFile(ctx, db.write)
	if err != nil {
		return whole(fmt.Errorf("migrate database: %w", err), db.path)
	}
	defer unlock()
	return whole(db.migrate(ctx, goose.DialectSQLite3, fsys, "sqlite"), db.path)
}

func (db *DB) migrate(ctx context.Context, dialect goose.Dialect, fsys fs.FS, dir string) error {
	sub, err := fs.Sub(fsys, dir)
	if err != nil {
		return fmt.Errorf("migrate database: %w", err)
	}
	p, err := goose.NewProvider(dialect, db.write, sub, goose.WithVerbose(false))
	if err != nil {
		return fmt.Errorf("migrate database: read migrations of %s: %w", dir, err)
	}
	has, err := p.GetDBVersion(ctx)
	if err != nil {
		return fmt.Errorf("migrate database: %w", domain(err))
	}
	sources := p.ListSources()
	if newest := sources[len(sources)-1].Version; has > newest {
		return ErrNewer.With("has", strconv.FormatInt(has, 10)).With("knows", strconv.FormatInt(newest, 10))
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("migrate database: %w", domain(err))
	}
	return nil
}

// lockFile holds an exclusive lock on "<database>.migrate" until unlock. The lock is released if
// the process ends; the file stays.
func lockFile(ctx context.Context, db *sql.DB) (unlock func(), err error) {
	var seq int
	var name, path string
	if err := db.QueryRowContext(ctx, "PRAGMA database_list").Scan(&seq, &name, &path); err != nil {
		return nil, fmt.Errorf("find the database file: %w", err)
	}
	if path == "" { // in memory, so no other process can open it
		return func() {}, nil
	}
	return lockPath(ctx, path)
}

func lockPath(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path+".migrate", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if err != syscall.EWOULDBLOCK && err != syscall.EINTR {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("wait for another process to migrate (lock %s): %w", f.Name(), ctx.Err())
		case <-poll.C:
		}
	}
}
