// Package sqlstore keeps the ledger of sessions in a SQL database.
package sqlstore

import (
	"context"
	"database/sql"
	"fmt"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/gateway"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/services/gateway"
)

// Store implements gateway.Store.
type Store struct{ db *sqldb.DB }

// Open opens or makes the service's database and brings its schema up to date.
func Open(ctx context.Context, place sqldb.Place) (*Store, error) {
	db, err := sqldb.Ready(ctx, place, "rollout-gateway", sqldb.Normal, schema.Migrations)
	if err != nil {
		return nil, err
	}
	return &Store{db: db}, nil
}

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// Append implements gateway.Store.
func (s *Store) Append(ctx context.Context, session string, turns []*gateway.Turn) error {
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		for _, t := range turns {
			raw, err := proto.Marshal(t)
			if err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO turn (session_id, turn) VALUES ($1, $2)`, session, raw); err != nil {
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
	var turns []*gateway.Turn
	err := s.db.Each(ctx, `SELECT turn FROM turn WHERE session_id = $1 ORDER BY number`, []any{session}, func(scan sqldb.Scan) error {
		var raw []byte
		if err := scan(&raw); err != nil {
			return err
		}
		t := &gateway.Turn{}
		turns = append(turns, t)
		return proto.Unmarshal(raw, t)
	})
	if err != nil {
		return nil, fmt.Errorf("read session %s: %w", session, err)
	}
	if len(turns) == 0 {
		return nil, gateway.ErrSession.With("session", session)
	}
	return turns, nil
}

var _ gateway.Store = (*Store)(nil)
