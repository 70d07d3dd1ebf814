package sqldb

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/stdlib"
)

// Tx runs fn in a write transaction. It commits if fn returns nil, and rolls back if fn returns an
// error or panics. It returns the error of fn unchanged, or an error of this package if the
// database failed: rpcerr.ErrDiskFull if the file of the database could not grow.
//
// On PostgreSQL fn may be called again after a transaction that was certainly not committed: the
// server aborted it (serialization, deadlock), the connection broke before the commit was sent, or
// the server is a standby. So fn must reset its results on each call. If the answer to a commit was
// lost, the server is asked for the result, or the standby that was promoted in its place; see
// mark. Errors: ErrUnavailable, ErrConflict, ErrUnknown, or the fence's error.
func (db *DB) Tx(ctx context.Context, fn func(tx *sql.Tx) error) error {
	if !db.Postgres() {
		return sqliteError(once(ctx, db.write, nil, db.behind(ctx, fn)), db.path)
	}
	return db.again(ctx, func() (bool, error) { return db.attempt(ctx, db.behind(ctx, fn)) })
}

// behind returns fn preceded by the fence, if there is one.
func (db *DB) behind(ctx context.Context, fn func(tx *sql.Tx) error) func(tx *sql.Tx) error {
	if db.fence == nil {
		return fn
	}
	return func(tx *sql.Tx) error {
		if err := db.fence(ctx, tx); err != nil {
			return err
		}
		return fn(tx)
	}
}

// View runs fn in a read-only transaction on a consistent snapshot. It never waits for a writer. On
// PostgreSQL fn may be called again.
func (db *DB) View(ctx context.Context, fn func(tx *sql.Tx) error) error {
	if !db.Postgres() {
		return sqliteError(once(ctx, db.read, nil, fn), db.path)
	}
	return db.again(ctx, func() (bool, error) {
		return db.connected(ctx, func(conn *sql.Conn) (bool, error) {
			err := once(ctx, conn, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true}, fn)
			return err != nil && broken(conn), err
		})
	})
}

// Exec runs one statement in a write transaction and returns the number of rows that it changed.
func (db *DB) Exec(ctx context.Context, statement string, args ...any) (changed int64, err error) {
	if !db.Postgres() && db.fence == nil { // the statement is its own transaction
		res, err := db.write.ExecContext(ctx, statement, args...)
		if err != nil {
			return 0, sqliteError(err, db.path)
		}
		return res.RowsAffected()
	}
	err = db.Tx(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, statement, args...)
		if err != nil {
			return err
		}
		changed, err = res.RowsAffected()
		return err
	})
	return changed, err
}

// Scan reads the columns of a row into pointers.
type Scan func(dest ...any) error

// Each runs a query and calls row with each row.
func (db *DB) Each(ctx context.Context, query string, args []any, row func(scan Scan) error) error {
	called := false
	each := func(run func(context.Context, string, ...any) (*sql.Rows, error)) error {
		rows, err := run(ctx, query, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			called = true
			if err := row(rows.Scan); err != nil {
				return err
			}
		}
		return rows.Err()
	}
	if !db.Postgres() {
		return sqliteError(each(db.read.QueryContext), db.path)
	}
	return db.again(ctx, func() (bool, error) {
		return db.connected(ctx, func(conn *sql.Conn) (bool, error) {
			err := each(conn.QueryContext)
			return err != nil && !called && broken(conn), err
		})
	})
}

// One reads the first row of a query, or returns sql.ErrNoRows.
func (db *DB) One(ctx context.Context, query string, args []any, dest ...any) error {
	found := false
	err := db.Each(ctx, query, args, func(scan Scan) error {
		if found {
			return nil
		}
		found = true
		return scan(dest...)
	})
	if err == nil && !found {
		return sql.ErrNoRows
	}
	return err
}

// beginner is a *sql.DB or a *sql.Conn.
type beginner interface {
	BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
}

func once(ctx context.Context, db beginner, options *sql.TxOptions, fn func(tx *sql.Tx) error) (err error) {
	tx, err := db.BeginTx(ctx, options)
	if err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	done := false
	defer func() {
		if !done { // fn failed or panicked
			if e := tx.Rollback(); e != nil && !errors.Is(e, sql.ErrTxDone) && err == nil {
				err = fmt.Errorf("roll back: %w", e)
			}
		}
	}()
	if err := fn(tx); err != nil {
		return err
	}
	done = true
	if err := tx.Commit(); err != nil {
		return &commitError{err}
	}
	return nil
}

// commitError is an error of the commit, after which it is unknown whether the transaction was
// committed.
type commitError struct{ err error }

func (e *commitError) Error() string { return "commit transaction: " + e.err.Error() }
func (e *commitError) Unwrap() error { return e.err }

// again repeats try while its error says that nothing was committed and a retry may succeed.
func (db *DB) again(ctx context.Context, try func() (again bool, err error)) error {
	wait := backoff{limit: reconnect}
	for {
		again, err := try()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || !again || !wait.next(ctx) {
			return domain(err)
		}
	}
}

// connected calls fn with a dedicated connection.
func (db *DB) connected(ctx context.Context, fn func(conn *sql.Conn) (again bool, err error)) (bool, error) {
	conn, err := db.write.Conn(ctx)
	if err != nil {
		return transient(err), fmt.Errorf("connect to the database: %w", err)
	}
	defer conn.Close()
	w := db.postgres.watch(ctx, conn)
	defer w.stop() // also if fn panics
	again, err := fn(conn)
	err = w.explain(err)
	if state(err) == readOnly { // the next connection may find the primary
		_ = conn.Raw(func(any) error { return driver.ErrBadConn })
	}
	return again, err
}

// broken reports whether a connection is unusable. The server rolls back its uncommitted work.
func broken(conn *sql.Conn) bool {
	gone := true
	_ = conn.Raw(func(c any) error {
		gone = c.(*stdlib.Conn).Conn().IsClosed()
		return nil
	})
	return gone
}

// attempt is one try of a write transaction.
func (db *DB) attempt(ctx context.Context, fn func(tx *sql.Tx) error) (again bool, err error) {
	m := db.postgres.marks.take()
	defer db.postgres.marks.put(m)
	lost := false
	again, err = db.connected(ctx, func(conn *sql.Conn) (bool, error) {
		err := once(ctx, conn, nil, func(tx *sql.Tx) error {
			if err := m.set(ctx, tx); err != nil {
				return err
			}
			return fn(tx)
		})
		if err == nil {
			return false, nil
		}
		var commit *commitError
		code := state(err)
		if lost = errors.As(err, &commit) && code == "" && broken(conn); lost {
			return false, err
		}
		return code == serializationFailure || code == deadlockDetected || code == readOnly || broken(conn), err
	})
	if !lost {
		return again, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resolveWithin)
	defer cancel()
	committed, unknown := m.committed(ctx, db.write)
	if unknown != nil {
		return false, errors.Join(unknown, err)
	}
	if committed {
		return false, nil
	}
	return true, err
}
