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

// Open opens the database of the service, creates it if needed, and migrates its schema.
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

// expireBatch is how many turns are read at a time, because a turn may have tens of thousands of
// tokens.
const expireBatch = 64

// Expire implements gateway.Store. It reads turns in the order in which they were written, up to
// the first that is not old.
func (s *Store) Expire(ctx context.Context, before time.Time) (sessions int, err error) {
	after, done := int64(0), false
	for !done && err == nil {
		turns := 0
		old := map[string]bool{}
		err = s.db.Each(ctx, `SELECT number, session_id, turn FROM turn WHERE number > $1 ORDER BY number LIMIT $2`, []any{after, expireBatch}, func(scan sqldb.Scan) error {
			var number int64
			var session string
			var raw []byte
			if err := scan(&number, &session, &raw); err != nil {
				return err
			}
			turns++
			recent, err := since(raw, before)
			if done = done || recent; !done {
				after, old[session] = number, true
			}
			return err
		})
		done = done || turns < expireBatch
		for session := range old {
			if err != nil {
				break
			}
			var deleted bool
			if deleted, err = s.expire(ctx, session, before); deleted {
				sessions++
			}
		}
	}
	if err != nil {
		return sessions, fmt.Errorf("delete expired sessions: %w", err)
	}
	return sessions, nil
}

// expire deletes a session unless it has a recent turn, or gets one in the meantime.
func (s *Store) expire(ctx context.Context, session string, before time.Time) (deleted bool, err error) {
	var newest int64
	var raw []byte
	err = s.db.One(ctx, `SELECT number, turn FROM turn WHERE session_id = $1 ORDER BY number DESC LIMIT 1`, []any{session}, &newest, &raw)
	if errors.Is(err, sql.ErrNoRows) { // another gateway has deleted it
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if recent, err := since(raw, before); recent || err != nil {
		return false, err
	}
	n, err := s.db.Exec(ctx, `DELETE FROM turn WHERE session_id = $1 AND NOT EXISTS (SELECT 1 FROM turn AS later WHERE later.session_id = $1 AND later.number > $2)`, session, newest)
	return n > 0, err
}

// since reports whether a turn is at least as new as a time.
func since(raw []byte, before time.Time) (bool, error) {
	var t gateway.Turn
	if err := proto.Unmarshal(raw, &t); err != nil {
		return false, err
	}
	return !t.GetTime().AsTime().Before(before), nil
}

var _ gateway.Store = (*Store)(nil)
