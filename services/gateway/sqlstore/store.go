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

// Append implements gateway.Store. The row of the session is locked first, so that the numbers of a
// session become visible in order.
func (s *Store) Append(ctx context.Context, session, run string, segments []*gateway.Segment) (first int, err error) {
	err = s.db.Tx(ctx, func(tx *sql.Tx) error {
		var owner string
		var state int
		err := tx.QueryRowContext(ctx, `INSERT INTO session (session_id, run_id, segments, updated_ms) VALUES ($1, $2, 0, 0)
			ON CONFLICT (session_id) DO UPDATE SET segments = session.segments RETURNING run_id, segments, state`, session, run).Scan(&owner, &first, &state)
		if err != nil {
			return err
		}
		if state != open {
			return gateway.ErrSessionClosed.With("session", session)
		}
		if owner != run {
			return gateway.ErrSessionRun.WithMessage("session %s belongs to %s, not %s", session, owner, run)
		}
		next, newest := first, time.UnixMilli(0)
		for _, segment := range segments {
			added, err := add(ctx, tx, session, next, segment)
			if err != nil {
				return err
			}
			if added {
				next++
			}
			if t := segment.GetTime().AsTime(); t.After(newest) {
				newest = t
			}
		}
		_, err = tx.ExecContext(ctx, `UPDATE session SET segments = $2, updated_ms = CASE WHEN updated_ms < $3 THEN $3 ELSE updated_ms END WHERE session_id = $1`,
			session, next, newest.UnixMilli())
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("append to session %s: %w", session, err)
	}
	return first, nil
}

// add inserts a segment, unless the session has it.
func add(ctx context.Context, tx *sql.Tx, session string, number int, segment *gateway.Segment) (added bool, err error) {
	raw, err := proto.Marshal(segment)
	if err != nil {
		return false, err
	}
	name := segment.GetSegment().GetSegmentId()
	result, err := tx.ExecContext(ctx, `INSERT INTO segment (session_id, number, segment_id, segment) VALUES ($1, $2, $3, $4) ON CONFLICT (session_id, segment_id) DO NOTHING`,
		session, number, name, raw)
	if err != nil {
		return false, err
	}
	if n, err := result.RowsAffected(); n > 0 || err != nil {
		return n > 0, err
	}
	if err := tx.QueryRowContext(ctx, `SELECT segment FROM segment WHERE session_id = $1 AND segment_id = $2`, session, name).Scan(&raw); err != nil {
		return false, err
	}
	var stored gateway.Segment
	if err := proto.Unmarshal(raw, &stored); err != nil {
		return false, err
	}
	if !proto.Equal(stored.GetSegment(), segment.GetSegment()) {
		return false, gateway.ErrSegmentConflict.With("segment", name)
	}
	return false, nil
}

// States of a session.
const (
	open    = 0
	closed  = 1
	settled = 2
)

// Session implements gateway.Store.
func (s *Store) Session(ctx context.Context, session string, from int) (*gateway.Session, error) {
	found := &gateway.Session{}
	var task, ended []byte
	err := s.db.One(ctx, `SELECT run_id, task, ended FROM session WHERE session_id = $1`, []any{session}, &found.RunId, &task, &ended)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, gateway.ErrSession.With("session", session)
	}
	if err == nil {
		err = describe(found, task, ended)
	}
	if err == nil {
		err = s.db.Each(ctx, `SELECT segment FROM segment WHERE session_id = $1 AND number >= $2 ORDER BY number`, []any{session, from}, func(scan sqldb.Scan) error {
			var raw []byte
			if err := scan(&raw); err != nil {
				return err
			}
			segment := &gateway.Segment{}
			found.Segments = append(found.Segments, segment)
			return proto.Unmarshal(raw, segment)
		})
	}
	if err != nil {
		return nil, fmt.Errorf("read session %s: %w", session, err)
	}
	return found, nil
}

// describe sets the task and the end of a session from their columns.
func describe(session *gateway.Session, task, ended []byte) error {
	if task != nil {
		session.Task = &gateway.Task{}
		if err := proto.Unmarshal(task, session.GetTask()); err != nil {
			return err
		}
	}
	if ended != nil {
		session.End = &gateway.End{}
		return proto.Unmarshal(ended, session.GetEnd())
	}
	return nil
}

// expireBatch is how many sessions are deleted in one transaction.
const expireBatch = 64

// Expire implements gateway.Store.
func (s *Store) Expire(ctx context.Context, before time.Time) (sessions int, err error) {
	for {
		n, err := s.expire(ctx, before)
		if sessions += n; n < expireBatch || err != nil {
			if err != nil {
				err = fmt.Errorf("delete expired sessions: %w", err)
			}
			return sessions, err
		}
	}
}

// expire deletes some old sessions. A session that gets a segment in the meantime stays.
func (s *Store) expire(ctx context.Context, before time.Time) (deleted int, err error) {
	err = s.db.Tx(ctx, func(tx *sql.Tx) error {
		old, err := names(ctx, tx, `DELETE FROM session WHERE updated_ms < $1 AND session_id IN
			(SELECT session_id FROM session WHERE updated_ms < $1 ORDER BY updated_ms LIMIT $2) RETURNING session_id`, before.UnixMilli(), expireBatch)
		if err != nil {
			return err
		}
		for _, name := range old {
			if _, err := tx.ExecContext(ctx, `DELETE FROM segment WHERE session_id = $1`, name); err != nil {
				return err
			}
		}
		deleted = len(old)
		return nil
	})
	return deleted, err
}

var _ gateway.Store = (*Store)(nil)
