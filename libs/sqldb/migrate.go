package sqldb

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/pressly/goose/v3"
)

// Migrate applies the goose migrations of fsys/dir (NNNNN_name.sql) that a SQLite database lacks, each in its transaction.
// Processes that start together take turns by a lock file beside the database; ctx bounds the wait.
func Migrate(ctx context.Context, db *sql.DB, fsys fs.FS, dir string) error {
	unlock, err := lockFile(ctx, db)
	if err != nil {
		return fmt.Errorf("migrate database: %w", err)
	}
	defer unlock()
	sub, err := fs.Sub(fsys, dir)
	if err != nil {
		return fmt.Errorf("migrate database: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectSQLite3, db, sub, goose.WithVerbose(false))
	if err != nil {
		return fmt.Errorf("migrate database: read migrations of %s: %w", dir, err)
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("migrate database: %w", err)
	}
	return nil
}

// lockFile holds an exclusive lock on "<database>.migrate" until unlock. The lock ends with its process; the file stays.
func lockFile(ctx context.Context, db *sql.DB) (unlock func(), err error) {
	var seq int
	var name, path string
	if err := db.QueryRowContext(ctx, "PRAGMA database_list").Scan(&seq, &name, &path); err != nil {
		return nil, fmt.Errorf("find the database file: %w", err)
	}
	if path == "" { // in memory: no other process sees it
		return func() {}, nil
	}
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
