// Package sqlite keeps the ledger of sessions in one SQLite file.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/gateway"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/services/gateway"
)

// Store implements gateway.Store.
type Store struct{ db *sqldb.SQLite }

// Open opens or makes the database at path and brings its schema up to date.
func Open(ctx context.Context, path string) (*Store, error) {
	db, err := sqldb.OpenSQLiteWith(path, sqldb.Normal)
	if err != nil {
		return nil, err
	}
	if err := sqldb.Migrate(ctx, db.DB, schema.Migrations, "sqlite"); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &Store{db: db}, nil
}

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// Append implements gateway.Store.
func (s *Store) Append(ctx context.Context, session string, turns []*gateway.Turn) error {
	err := sqldb.Tx(ctx, s.db, func(tx *sql.Tx) error {
		for _, t := range turns {
			raw, err := proto.Marshal(t)
			if err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO turn (session_id, turn) VALUES (?, ?)`, session, raw); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("append to session %s: %w", session, err)
	}
	return nil
}

// Turns implements gateway.Store.
func (s *Store) Turns(ctx context.Context, session string) ([]*gateway.Turn, error) {
	rows, err := s.db.Read.QueryContext(ctx, `SELECT turn FROM turn WHERE session_id = ? ORDER BY number`, session)
	if err != nil {
		return nil, fmt.Errorf("read session %s: %w", session, err)
	}
	defer func() { _ = rows.Close() }()
	var turns []*gateway.Turn
	for rows.Next() {
		var raw []byte
		if err := rows.Scan(&raw); err != nil {
			return nil, fmt.Errorf("read session %s: %w", session, err)
		}
		t := &gateway.Turn{}
		if err := proto.Unmarshal(raw, t); err != nil {
			return nil, fmt.Errorf("read session %s: %w", session, err)
		}
		turns = append(turns, t)
	}
	if len(turns) == 0 && rows.Err() == nil {
		return nil, gateway.ErrSession.With("session", session)
	}
	return turns, rows.Err()
}

var _ gateway.Store = (*Store)(nil)
