// Package sqlstore keeps the ledger of sessions, responses, and API keys in a SQL database.
package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/gateway"
	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/sqldb"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// Store implements gateway.Store.
type Store struct {
	db    *sqldb.DB
	queue queue

	read, reserve, insertSegment, insertTwo statement
}

// Open opens the database of the service, creates it if needed, and migrates its schema.
func Open(ctx context.Context, place sqldb.Place) (*Store, error) {
	db, err := sqldb.Ready(ctx, place, "rollout-gateway", sqldb.Normal, schema.Migrations)
	if err != nil {
		return nil, err
	}
	s := &Store{db: db}
	for text, statement := range map[string]*statement{readSession: &s.read, reserve: &s.reserve, insertSegment: &s.insertSegment, insertTwo: &s.insertTwo} {
		if *statement, err = prepare(ctx, db, text); err != nil {
			return nil, errors.Join(err, db.Close())
		}
	}
	return s, nil
}

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// States of a session.
const (
	open    = 0
	closed  = 1
	settled = 2
)

const readSession = `SELECT s.run_id, s.task, s.ended, g.segment FROM session s
	LEFT JOIN segment g ON g.session_id = s.session_id AND g.number >= $2 WHERE s.session_id = $1 ORDER BY g.number`

// Session implements gateway.Store.
func (s *Store) Session(ctx context.Context, session string, from int) (*gateway.Session, error) {
	var found *gateway.Session
	err := s.read.each(ctx, []any{session, from}, func(scan sqldb.Scan) error {
		var run string
		var task, ended, raw []byte
		if err := scan(&run, &task, &ended, &raw); err != nil {
			return err
		}
		if found == nil {
			found = &gateway.Session{RunId: run}
			if err := describe(found, task, ended); err != nil {
				return err
			}
		}
		if raw == nil { // it has no segments
			return nil
		}
		segment := &gateway.Segment{}
		found.Segments = append(found.Segments, segment)
		return proto.Unmarshal(raw, segment)
	})
	if err != nil {
		return nil, fmt.Errorf("read session %s: %w", session, err)
	}
	if found == nil {
		return nil, gateway.NoSession(session)
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

// deleteBatch is how many sessions are deleted in one transaction.
const deleteBatch = 64

// Expire implements gateway.Store.
func (s *Store) Expire(ctx context.Context, before time.Time) (sessions int, err error) {
	return s.deleteAll(ctx, `updated_ms < $1`, before.UnixMilli())
}

// DeleteRun implements gateway.Store.
func (s *Store) DeleteRun(ctx context.Context, run string, by *fencev1.Fence) error {
	if err := s.db.Tx(ctx, func(tx *sql.Tx) error { return fence.Delete(ctx, tx, s.db.Dialect, run, by) }); err != nil {
		return fmt.Errorf("delete the sessions of %s: %w", run, err)
	}
	_, err := s.deleteAll(ctx, `run_id = $1`, run)
	return err
}

// deleteAll deletes the sessions that a condition selects.
func (s *Store) deleteAll(ctx context.Context, condition string, arg any) (sessions int, err error) {
	for {
		n, err := s.deleteSome(ctx, condition, arg)
		if sessions += n; n < deleteBatch || err != nil {
			if err != nil {
				err = fmt.Errorf("delete sessions: %w", err)
			}
			return sessions, err
		}
	}
}

// deleteSome deletes some sessions, those first that are old. A session that the condition does not
// select any more, as when it gets a segment in the meantime, stays.
func (s *Store) deleteSome(ctx context.Context, condition string, arg any) (deleted int, err error) {
	err = s.db.Tx(ctx, func(tx *sql.Tx) error {
		old, err := names(ctx, tx, `DELETE FROM session WHERE `+condition+` AND session_id IN
			(SELECT session_id FROM session WHERE `+condition+` ORDER BY updated_ms LIMIT $2) RETURNING session_id`, arg, deleteBatch)
		if err != nil {
			return err
		}
		for _, name := range old {
			for _, of := range []string{"segment", "response"} {
				if _, err := tx.ExecContext(ctx, `DELETE FROM `+of+` WHERE session_id = $1`, name); err != nil {
					return err
				}
			}
		}
		deleted = len(old)
		return nil
	})
	return deleted, err
}

var _ gateway.Store = (*Store)(nil)
