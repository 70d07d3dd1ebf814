package sqldb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
)

// Beginner is a *sql.DB, a *SQLite or a *sql.Conn.
type Beginner interface {
	BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
}

// Tx runs fn in a transaction: committed when fn returns nil, rolled back when it returns an error or panics. The error of fn
// comes back as it is. An error of the commit itself leaves open whether it happened.
func Tx(ctx context.Context, db Beginner, fn func(tx *sql.Tx) error) (err error) {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	done := false
	defer func() {
		if !done { // fn failed or panicked
			if e := tx.Rollback(); e != nil && !errors.Is(e, sql.ErrTxDone) {
				err = errors.Join(err, fmt.Errorf("roll back: %w", e))
			}
		}
	}()
	if err := fn(tx); err != nil {
		return err
	}
	done = true
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit transaction: %w", err)
	}
	return nil
}
