package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/services/gateway"
)

// Issue implements gateway.Store. The unique index of group and sample lets one of two gateways
// that issue the same group win.
func (s *Store) Issue(ctx context.Context, run string, tasks []*gateway.Task) (issued []*gateway.Task, err error) {
	err = s.db.Tx(ctx, func(tx *sql.Tx) error {
		if err := fence.Live(ctx, tx, s.db.Dialect, run); err != nil {
			return err
		}
		for _, task := range tasks {
			raw, err := proto.Marshal(task)
			if err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO session (session_id, run_id, segments, updated_ms, group_id, sample, task, due_ms)
				VALUES ($1, $2, 0, $6, $3, $4, $5, $6) ON CONFLICT (group_id, sample) WHERE group_id <> '' DO NOTHING`,
				task.GetSessionId(), run, gateway.GroupID(task.GetKey()), task.GetKey().GetSample(), raw, task.GetDeadline().AsTime().UnixMilli()); err != nil {
				return err
			}
		}
		rows, err := tx.QueryContext(ctx, `SELECT task FROM session WHERE group_id = $1 ORDER BY sample`, gateway.GroupID(tasks[0].GetKey()))
		if err != nil {
			return err
		}
		defer func() { _ = rows.Close() }()
		issued = nil
		for rows.Next() {
			var raw []byte
			if err := rows.Scan(&raw); err != nil {
				return err
			}
			task := &gateway.Task{}
			if err := proto.Unmarshal(raw, task); err != nil {
				return err
			}
			issued = append(issued, task)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("issue a prompt group of %s: %w", run, err)
	}
	return issued, nil
}

// Bind implements gateway.Store.
func (s *Store) Bind(ctx context.Context, task *gateway.Task) (*gateway.Task, error) {
	raw, err := proto.Marshal(task)
	if err == nil {
		_, err = s.db.Exec(ctx, `UPDATE session SET group_id = $2, sample = $3, task = $4, due_ms = $5 WHERE session_id = $1 AND group_id = ''`,
			task.GetSessionId(), gateway.GroupID(task.GetKey()), task.GetKey().GetSample(), raw, task.GetDeadline().AsTime().UnixMilli())
	}
	if err != nil {
		return nil, fmt.Errorf("bind session %s: %w", task.GetSessionId(), err)
	}
	found, err := s.Session(ctx, task.GetSessionId(), 0)
	return found.GetTask(), err
}

// Finish implements gateway.Store. The row of the session is locked, so that no segment is added
// after its end.
func (s *Store) Finish(ctx context.Context, session string, end *gateway.End, due time.Time) (*gateway.Session, error) {
	raw, err := proto.Marshal(end)
	if err == nil {
		_, err = s.db.Exec(ctx, `UPDATE session SET state = $2, ended = $3, due_ms = $4 WHERE session_id = $1 AND state = $5`, session, closed, raw, due.UnixMilli(), open)
	}
	if err != nil {
		return nil, fmt.Errorf("close session %s: %w", session, err)
	}
	return s.Session(ctx, session, 0)
}

// Settle implements gateway.Store.
func (s *Store) Settle(ctx context.Context, session string, end *gateway.End) error {
	raw, err := proto.Marshal(end)
	if err == nil {
		_, err = s.db.Exec(ctx, `UPDATE session SET state = $2, ended = $3, due_ms = 0 WHERE session_id = $1 AND state <> $4`, session, settled, raw, open)
	}
	if err != nil {
		return fmt.Errorf("settle session %s: %w", session, err)
	}
	return nil
}

// Unsettled implements gateway.Store.
func (s *Store) Unsettled(ctx context.Context, group string) (n int, err error) {
	err = s.db.One(ctx, `SELECT COUNT(*) FROM session WHERE group_id = $1 AND state <> $2`, []any{group, settled}, &n)
	if err != nil {
		return 0, fmt.Errorf("read prompt group %s: %w", group, err)
	}
	return n, nil
}

// Due implements gateway.Store.
func (s *Store) Due(ctx context.Context, before, again time.Time, limit int) (sessions []string, err error) {
	var found int
	err = s.db.One(ctx, `SELECT 1 FROM session WHERE due_ms > 0 AND due_ms < $1 LIMIT 1`, []any{before.UnixMilli()}, &found) // a read does not block writers
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err == nil {
		err = s.db.Tx(ctx, func(tx *sql.Tx) error {
			sessions, err = names(ctx, tx, `UPDATE session SET due_ms = $2 WHERE due_ms > 0 AND due_ms < $1 AND session_id IN
				(SELECT session_id FROM session WHERE due_ms > 0 AND due_ms < $1 ORDER BY due_ms LIMIT $3) RETURNING session_id`,
				before.UnixMilli(), again.UnixMilli(), limit)
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("read the sessions that are due: %w", err)
	}
	return sessions, nil
}

// names reads the session ids that a statement returns.
func names(ctx context.Context, tx *sql.Tx, statement string, args ...any) (found []string, err error) {
	rows, err := tx.QueryContext(ctx, statement, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		found = append(found, name)
	}
	return found, rows.Err()
}
