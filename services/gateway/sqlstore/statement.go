package sqlstore

import (
	"context"
	"database/sql"

	"github.com/rollout-rl/rollout/libs/sqldb"
)

// statement is a SQL text of every request. SQLite parses it when the store opens.
type statement struct {
	db       *sqldb.DB
	text     string
	prepared *sqldb.Prepared // nil: PostgreSQL
}

func prepare(ctx context.Context, db *sqldb.DB, text string) (statement, error) {
	prepared, err := db.Prepare(ctx, text)
	return statement{db: db, text: text, prepared: prepared}, err
}

// row is tx.QueryRowContext. The driver of SQLite would start a goroutine for a context that may
// end; the transaction ends with it anyway.
func (s statement) row(ctx context.Context, tx *sql.Tx, args ...any) *sql.Row {
	if s.prepared == nil {
		return tx.QueryRowContext(ctx, s.text, args...)
	}
	ctx = context.WithoutCancel(ctx)
	return tx.StmtContext(ctx, s.prepared.In(true)).QueryRowContext(ctx, args...) //nolint:sqlclosecheck // closed with the transaction
}

// exec is tx.ExecContext.
func (s statement) exec(ctx context.Context, tx *sql.Tx, args ...any) (sql.Result, error) {
	if s.prepared == nil {
		return tx.ExecContext(ctx, s.text, args...)
	}
	ctx = context.WithoutCancel(ctx)
	return tx.StmtContext(ctx, s.prepared.In(true)).ExecContext(ctx, args...) //nolint:sqlclosecheck // closed with the transaction
}

// each is db.Each.
func (s statement) each(ctx context.Context, args []any, row func(scan sqldb.Scan) error) error {
	if s.prepared == nil {
		return s.db.Each(ctx, s.text, args, row)
	}
	rows, err := s.prepared.In(false).QueryContext(context.WithoutCancel(ctx), args...) //nolint:sqlclosecheck // the statement is closed with the database
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		if err := row(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}
