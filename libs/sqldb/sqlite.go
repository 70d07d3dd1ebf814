package sqldb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"time"

	_ "modernc.org/sqlite" // the "sqlite" driver, pure Go
)

// OpenSQLite opens the database file at path, or creates it with its folder, in WAL mode: with a
// single connection for writes, and a pool of connections for reads, which never wait for a write.
//
// Inside a write transaction use only the transaction: a second one would wait for the first
// forever.
func OpenSQLite(path string, d Durability) (*DB, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	write, err := openPool(path, d, 1)
	if err != nil {
		return nil, err
	}
	// The file must exist in WAL mode before a query-only connection opens it. If two processes switch
	// a new file to WAL at the same time, one of them fails as locked despite the busy timeout, so a
	// lock file serializes them.
	if err := inTurn(path, write.PingContext); err != nil {
		return nil, errors.Join(whole(fmt.Errorf("open database %s: %w", path, err), path), write.Close())
	}
	read, err := openPool(path, d, max(2, runtime.GOMAXPROCS(0)), "query_only(1)")
	if err != nil {
		return nil, errors.Join(err, write.Close())
	}
	return &DB{write: write, read: read, path: path}, nil
}

func inTurn(path string, fn func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), openWait)
	defer cancel()
	unlock, err := lockPath(ctx, path)
	if err != nil {
		return err
	}
	defer unlock()
	return fn(ctx)
}

// openWait is how long opening a file waits for other processes, which may run a migration.
const openWait = time.Minute

func openPool(path string, d Durability, conns int, extra ...string) (*sql.DB, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	q := url.Values{
		"_pragma": append([]string{
			"busy_timeout(10000)", // another process may hold the write lock for this long
			"journal_mode(WAL)",
			"synchronous(" + string(d) + ")",
			"foreign_keys(1)",
			"temp_store(MEMORY)",
		}, extra...),
		"_txlock":      {"immediate"}, // take the write lock at BEGIN: no deadlock when a read becomes a write
		"_time_format": {"sqlite"},
	}
	if len(extra) > 0 {
		q.Set("_txlock", "deferred")
	}
	dsn := url.URL{Scheme: "file", Path: abs, RawQuery: q.Encode()}
	db, err := sql.Open("sqlite", dsn.String())
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", path, err)
	}
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	return db, nil
}
