package sqlite

import (
	"context"
	"database/sql"
	"fmt"
)

// statements are parsed once a connection: of a transaction of 8 samples parsing was a third. They are made when the store opens,
// because inside a transaction the one writing connection is taken. What is not here is parsed as it comes.
type statements map[string]*sql.Stmt

func prepare(ctx context.Context, db *sql.DB, texts ...string) (statements, error) {
	out := make(statements, len(texts))
	for _, text := range texts {
		st, err := db.PrepareContext(ctx, text) //nolint:sqlclosecheck // closed with the database
		if err != nil {
			return nil, fmt.Errorf("prepare %q: %w", text, err)
		}
		out[text] = st
	}
	return out, nil
}

// query is tx.QueryContext.
func (s statements) query(ctx context.Context, tx *sql.Tx, text string, args ...any) (*sql.Rows, error) {
	if st := s[text]; st != nil {
		return tx.StmtContext(ctx, st).QueryContext(ctx, args...) //nolint:sqlclosecheck // closed with the transaction
	}
	return tx.QueryContext(ctx, text, args...)
}

// exec is tx.ExecContext. The transaction itself ends with ctx; the driver would start a goroutine a statement to watch it too.
func (s statements) exec(ctx context.Context, tx *sql.Tx, text string, args ...any) (sql.Result, error) {
	ctx = context.WithoutCancel(ctx)
	if st := s[text]; st != nil {
		return tx.StmtContext(ctx, st).ExecContext(ctx, args...) //nolint:sqlclosecheck // closed with the transaction
	}
	return tx.ExecContext(ctx, text, args...)
}
