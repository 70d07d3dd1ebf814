// Package sqlstore keeps the ledger of sessions in a SQL database.
package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

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

// forgetBatch is how many turns are looked at together: one may have tens of thousands of tokens.
const forgetBatch = 64

// Forget implements gateway.Store. Turns are looked at in the order in which they were written, up to the first that is young.
func (s *Store) Forget(ctx context.Context, before time.Time) (sessions int, err error) {
	after, whole := int64(0), false
	for !whole && err == nil {
		looked := 0
		old := map[string]bool{}
		err = s.db.Each(ctx, `SELECT number, session_id, turn FROM turn WHERE number > $1 ORDER BY number LIMIT $2`, []any{after, forgetBatch}, func(scan sqldb.Scan) error {
			var number int64
			var session string
			var raw []byte
			if err := scan(&number, &session, &raw); err != nil {
				return err
			}
			looked++
			young, err := since(raw, before)
			if whole = whole || young; !whole {
				after, old[session] = number, true
			}
			return err
		})
		whole = whole || looked < forgetBatch
		for session := range old {
			if err != nil {
				break
			}
			var gone bool
			if gone, err = s.forget(ctx, session, before); gone {
				sessions++
			}
		}
	}
	if err != nil {
		return sessions, fmt.Errorf("forget old sessions: %w", err)
	}
	return sessions, nil
}

// forget removes a session unless it has a young turn, or gets one meanwhile.
func (s *Store) forget(ctx context.Context, session string, before time.Time) (gone bool, err error) {
	var newest int64
	var raw []byte
	err = s.db.One(ctx, `SELECT number, turn FROM turn WHERE session_id = $1 ORDER BY number DESC LIMIT 1`, []any{session}, &newest, &raw)
	if errors.Is(err, sql.ErrNoRows) { // another gateway was faster
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if young, err := since(raw, before); young || err != nil {
		return false, err
	}
	n, err := s.db.Exec(ctx, `DELETE FROM turn WHERE session_id = $1 AND NOT EXISTS (SELECT 1 FROM turn AS later WHERE later.session_id = $1 AND later.number > $2)`, session, newest)
	return n > 0, err
}

// since reports whether a turn is not older than a time.
func since(raw []byte, before time.Time) (bool, error) {
	var t gateway.Turn
	if err := proto.Unmarshal(raw, &t); err != nil {
		return false, err
	}
	return !t.GetTime().AsTime().Before(before), nil
}

var _ gateway.Store = (*Store)(nil)
