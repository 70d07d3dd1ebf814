// Package sqlstore stores runs and cursors in a SQL database.
package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/scheduler"
	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/sqldb"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
)

// Store implements scheduler.Store.
type Store struct{ db *sqldb.DB }

// Open opens or creates the database of the service and migrates its schema.
func Open(ctx context.Context, place sqldb.Place) (*Store, error) {
	db, err := sqldb.Ready(ctx, place, "scheduler", sqldb.Full, schema.Migrations)
	if err != nil {
		return nil, err
	}
	return &Store{db: db}, nil
}

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// Blocked lists the services that wait for locks of the database.
func (s *Store) Blocked(ctx context.Context) ([]sqldb.Blocked, error) { return s.db.Blocked(ctx) }

// Lease is the table by which one of several replicas leads.
func (s *Store) Lease() *lease.Table { return lease.NewTable(s.db, "scheduler") }

// Fenced is the same store with writes that fail unless the fence allows them.
func (s *Store) Fenced(fence sqldb.Fence) *Store {
	fenced := *s
	fenced.db = s.db.Fenced(fence)
	return &fenced
}

// Create implements scheduler.Store.
func (s *Store) Create(ctx context.Context, run *scheduler.Run, key string, c scheduler.Cursor) (*scheduler.Run, error) {
	record, err := proto.Marshal(run)
	if err != nil {
		return nil, fmt.Errorf("create run: %w", err)
	}
	kept := run
	err = s.db.Tx(ctx, func(tx *sql.Tx) error {
		kept = run
		res, err := tx.ExecContext(ctx, `INSERT INTO run (run_id, name, state, idempotency_key, record, queues, project) VALUES ($1, $2, $3, $4, $5, $6, $7)
				ON CONFLICT (idempotency_key) DO NOTHING`,
			run.GetRunId(), run.GetName(), int32(run.GetState()), sql.NullString{String: key, Valid: key != ""}, record, []byte{}, run.GetProject())
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			if err == nil {
				kept, err = one(tx.QueryRowContext(ctx, `SELECT record FROM run WHERE idempotency_key = $1`, key).Scan)
			}
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO cursor (run_id, position, first, step) VALUES ($1, $2, $3, $4)`,
			run.GetRunId(), int64(c.Position), int64(c.First), int64(c.FirstStep))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create run %s: %w", run.GetRunId(), err)
	}
	return kept, nil
}

// Update implements scheduler.Store.
func (s *Store) Update(ctx context.Context, id string, change func(*scheduler.Run) error) (*scheduler.Run, error) {
	var run *scheduler.Run
	err := s.db.Tx(ctx, func(tx *sql.Tx) (err error) {
		if run, err = one(tx.QueryRowContext(ctx, `SELECT record FROM run WHERE run_id = $1`+s.db.ForUpdate(), id).Scan); err != nil {
			return err
		}
		if err := change(run); err != nil {
			return err
		}
		record, err := proto.Marshal(run)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `UPDATE run SET state = $1, record = $2 WHERE run_id = $3`, int32(run.GetState()), record, id)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("update run %s: %w", id, err)
	}
	return run, nil
}

// Advance implements scheduler.Store.
func (s *Store) Advance(ctx context.Context, id string, from, to uint64) error {
	if to <= from {
		return scheduler.ErrCursor.With("run", id).With("from", fmt.Sprint(from))
	}
	n, err := s.db.Exec(ctx, `UPDATE cursor SET position = $1 WHERE run_id = $2 AND position IN ($1, $3)`, int64(to), id, int64(from))
	if err != nil {
		return fmt.Errorf("advance the cursor of %s: %w", id, err)
	}
	if n != 1 {
		return scheduler.ErrCursor.With("run", id).With("from", fmt.Sprint(from))
	}
	return nil
}

// KeepQueues implements scheduler.Store.
func (s *Store) KeepQueues(ctx context.Context, id string, q *runv1.Queues) error {
	b, err := proto.Marshal(q)
	if err == nil {
		_, err = s.db.Exec(ctx, `UPDATE run SET queues = $1 WHERE run_id = $2`, append([]byte{}, b...), id)
	}
	if err != nil {
		return fmt.Errorf("keep the queues of %s: %w", id, err)
	}
	return nil
}

// Delete implements scheduler.Store.
func (s *Store) Delete(ctx context.Context, id string) error {
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		for _, table := range []string{"cursor", "run"} {
			if _, err := tx.ExecContext(ctx, `DELETE FROM `+table+` WHERE run_id = $1`, id); err != nil {
				return err
			}
		}
		return fence.Bury(ctx, tx, s.db.Dialect, id)
	})
	if err != nil {
		return fmt.Errorf("delete run %s: %w", id, err)
	}
	return nil
}

// Admit implements scheduler.Store.
func (s *Store) Admit(ctx context.Context, id string, by *fencev1.Fence) error {
	return s.db.Tx(ctx, func(tx *sql.Tx) error { return fence.Admit(ctx, tx, s.db.Dialect, id, by) })
}

// Get implements scheduler.Reader.
func (s *Store) Get(ctx context.Context, id string) (*scheduler.Run, error) {
	run, err := s.first(ctx, `SELECT record FROM run WHERE run_id = $1`, id)
	if err != nil {
		return nil, fmt.Errorf("get run %s: %w", id, err)
	}
	return run, nil
}

// Resolve implements scheduler.Reader.
func (s *Store) Resolve(ctx context.Context, project *string, ref string) (*scheduler.Run, error) {
	for _, q := range []struct {
		where, order string
		args         []any
	}{
		{`run_id = $1`, ``, []any{ref}},
		{`name = $1`, ` ORDER BY run_id DESC LIMIT 1`, []any{ref}},
		{`substr(run_id, 1, $1) = $2`, ` ORDER BY run_id LIMIT 2`, []any{len(ref), ref}},
	} {
		if project != nil {
			q.args = append(q.args, *project)
			q.where += fmt.Sprintf(" AND project = $%d", len(q.args))
		}
		found, err := s.query(ctx, `SELECT record FROM run WHERE `+q.where+q.order, q.args...)
		if err != nil {
			return nil, fmt.Errorf("find run %s: %w", ref, err)
		}
		if len(found) == 1 {
			return found[0], nil
		}
		if len(found) > 1 {
			return nil, scheduler.ErrAmbiguous.With("run", ref).WithMessage("the ids of several runs begin with %q", ref)
		}
	}
	return nil, scheduler.NotFound(ref)
}

// ByKey implements scheduler.Reader.
func (s *Store) ByKey(ctx context.Context, key string) (*scheduler.Run, error) {
	return s.first(ctx, `SELECT record FROM run WHERE idempotency_key = $1`, key)
}

// List implements scheduler.Reader.
func (s *Store) List(ctx context.Context, f scheduler.Filter) ([]*scheduler.Run, error) {
	var where []string
	var args []any
	if len(f.States) > 0 {
		where = append(where, "state "+s.db.Among(1))
		states, err := json.Marshal(f.States)
		if err != nil {
			return nil, fmt.Errorf("list runs: %w", err)
		}
		args = append(args, string(states))
	}
	if f.Project != nil {
		args = append(args, *f.Project)
		where = append(where, fmt.Sprintf("project = $%d", len(args)))
	}
	if f.After != "" {
		args = append(args, f.After)
		where = append(where, fmt.Sprintf("run_id < $%d", len(args)))
	}
	query := "SELECT record FROM run"
	if len(where) > 0 {
		query += " WHERE " + strings.Join(where, " AND ")
	}
	query += " ORDER BY run_id DESC"
	if f.Limit > 0 {
		args = append(args, f.Limit)
		query += fmt.Sprintf(" LIMIT $%d", len(args))
	}
	found, err := s.query(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("list runs: %w", err)
	}
	return found, nil
}

// Cursor implements scheduler.Reader.
func (s *Store) Cursor(ctx context.Context, id string) (scheduler.Cursor, error) {
	var position, first, step int64
	err := s.db.One(ctx, `SELECT position, first, step FROM cursor WHERE run_id = $1`, []any{id}, &position, &first, &step)
	if errors.Is(err, sql.ErrNoRows) {
		return scheduler.Cursor{}, scheduler.NotFound(id)
	}
	if err != nil {
		return scheduler.Cursor{}, fmt.Errorf("read the cursor of %s: %w", id, err)
	}
	return scheduler.Cursor{Position: uint64(position), First: uint64(first), FirstStep: uint64(step)}, nil
}

// Queues implements scheduler.Reader.
func (s *Store) Queues(ctx context.Context, id string) (*runv1.Queues, error) {
	var b []byte
	err := s.db.One(ctx, `SELECT queues FROM run WHERE run_id = $1`, []any{id}, &b)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, scheduler.NotFound(id)
	}
	q := &runv1.Queues{}
	if err == nil {
		err = proto.Unmarshal(b, q)
	}
	if err != nil {
		return nil, fmt.Errorf("read the queues of %s: %w", id, err)
	}
	return q, nil
}

func (s *Store) query(ctx context.Context, query string, args ...any) ([]*scheduler.Run, error) {
	var out []*scheduler.Run
	err := s.db.Each(ctx, query, args, func(scan sqldb.Scan) error {
		run, err := one(scan)
		out = append(out, run)
		return err
	})
	return out, err
}

func (s *Store) first(ctx context.Context, query string, args ...any) (*scheduler.Run, error) {
	found, err := s.query(ctx, query, args...)
	if err == nil && len(found) == 0 {
		err = scheduler.ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	return found[0], nil
}

func one(scan sqldb.Scan) (*scheduler.Run, error) {
	var record []byte
	if err := scan(&record); err != nil {
		if errors.Is(err, sql.ErrNoRows) {
			return nil, scheduler.ErrNotFound
		}
		return nil, err
	}
	run := &scheduler.Run{}
	if err := proto.Unmarshal(record, run); err != nil {
		return nil, fmt.Errorf("read run record: %w", err)
	}
	return run, nil
}
