// Package sqlite keeps runs and cursors in one SQLite file.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/scheduler"
	"github.com/rollout-rl/rollout/libs/sqldb"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
)

// Store implements scheduler.Store.
type Store struct{ db *sqldb.SQLite }

// Open opens or makes the database at path and brings its schema up to date.
func Open(ctx context.Context, path string) (*Store, error) {
	db, err := sqldb.OpenSQLite(path)
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

// Create implements scheduler.Store.
func (s *Store) Create(ctx context.Context, run *scheduler.Run, key string, c scheduler.Cursor) (*scheduler.Run, error) {
	record, err := proto.Marshal(run)
	if err != nil {
		return nil, fmt.Errorf("create run: %w", err)
	}
	kept := run
	err = sqldb.Tx(ctx, s.db, func(tx *sql.Tx) error {
		if key != "" {
			first, err := one(tx.QueryRowContext(ctx, `SELECT record FROM run WHERE idempotency_key = ?`, key))
			if err == nil {
				kept = first
				return nil
			}
			if !errors.Is(err, scheduler.ErrNotFound) {
				return err
			}
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO run (run_id, name, state, idempotency_key, record, queues) VALUES (?, ?, ?, ?, ?, x'')`,
			run.GetRunId(), run.GetName(), int32(run.GetState()), sql.NullString{String: key, Valid: key != ""}, record); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO cursor (run_id, position, first, step) VALUES (?, ?, ?, ?)`,
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
	err := sqldb.Tx(ctx, s.db, func(tx *sql.Tx) (err error) {
		if run, err = one(tx.QueryRowContext(ctx, `SELECT record FROM run WHERE run_id = ?`, id)); err != nil {
			return err
		}
		if err := change(run); err != nil {
			return err
		}
		record, err := proto.Marshal(run)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `UPDATE run SET state = ?, record = ? WHERE run_id = ?`, int32(run.GetState()), record, id)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("update run %s: %w", id, err)
	}
	return run, nil
}

// Advance implements scheduler.Store.
func (s *Store) Advance(ctx context.Context, id string, from, to uint64) error {
	res, err := s.db.ExecContext(ctx, `UPDATE cursor SET position = ? WHERE run_id = ? AND position = ? AND position < ?`,
		int64(to), id, int64(from), int64(to))
	if err != nil {
		return fmt.Errorf("advance the cursor of %s: %w", id, err)
	}
	if n, err := res.RowsAffected(); err != nil || n != 1 {
		return errors.Join(err, scheduler.ErrCursor.With("run", id).With("from", fmt.Sprint(from)))
	}
	return nil
}

// KeepQueues implements scheduler.Store.
func (s *Store) KeepQueues(ctx context.Context, id string, q *runv1.Queues) error {
	b, err := proto.Marshal(q)
	if err == nil {
		_, err = s.db.ExecContext(ctx, `UPDATE run SET queues = ? WHERE run_id = ?`, append([]byte{}, b...), id)
	}
	if err != nil {
		return fmt.Errorf("keep the queues of %s: %w", id, err)
	}
	return nil
}

// Get implements scheduler.Reader. Reads go through the writing connection's file; a committed write is seen at once.
func (s *Store) Get(ctx context.Context, id string) (*scheduler.Run, error) {
	run, err := one(s.db.Read.QueryRowContext(ctx, `SELECT record FROM run WHERE run_id = ?`, id))
	if err != nil {
		return nil, fmt.Errorf("get run %s: %w", id, err)
	}
	return run, nil
}

// Resolve implements scheduler.Reader.
func (s *Store) Resolve(ctx context.Context, ref string) (*scheduler.Run, error) {
	for _, q := range []struct {
		query string
		args  []any
	}{
		{`SELECT record FROM run WHERE run_id = ?`, []any{ref}},
		{`SELECT record FROM run WHERE name = ? ORDER BY run_id DESC LIMIT 1`, []any{ref}},
		{`SELECT record FROM run WHERE substr(run_id, 1, ?) = ? ORDER BY run_id LIMIT 2`, []any{len(ref), ref}},
	} {
		found, err := s.query(ctx, q.query, q.args...)
		if err != nil {
			return nil, fmt.Errorf("find run %s: %w", ref, err)
		}
		if len(found) == 1 {
			return found[0], nil
		}
		if len(found) > 1 {
			return nil, scheduler.ErrAmbiguous.With("run", ref)
		}
	}
	return nil, scheduler.ErrNotFound.With("run", ref)
}

// ByKey implements scheduler.Reader.
func (s *Store) ByKey(ctx context.Context, key string) (*scheduler.Run, error) {
	return one(s.db.Read.QueryRowContext(ctx, `SELECT record FROM run WHERE idempotency_key = ?`, key))
}

// List implements scheduler.Reader.
func (s *Store) List(ctx context.Context, f scheduler.Filter) ([]*scheduler.Run, error) {
	var where []string
	var args []any
	if len(f.States) > 0 {
		where = append(where, "state IN (?"+strings.Repeat(", ?", len(f.States)-1)+")")
		for _, state := range f.States {
			args = append(args, int32(state))
		}
	}
	if f.After != "" {
		where, args = append(where, "run_id < ?"), append(args, f.After)
	}
	query := "SELECT record FROM run"
	if len(where) > 0 {
		query += " WHERE " + strings.Join(where, " AND ")
	}
	query += " ORDER BY run_id DESC"
	if f.Limit > 0 {
		query, args = query+" LIMIT ?", append(args, f.Limit)
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
	err := s.db.Read.QueryRowContext(ctx, `SELECT position, first, step FROM cursor WHERE run_id = ?`, id).Scan(&position, &first, &step)
	if errors.Is(err, sql.ErrNoRows) {
		return scheduler.Cursor{}, scheduler.ErrNotFound.With("run", id)
	}
	if err != nil {
		return scheduler.Cursor{}, fmt.Errorf("read the cursor of %s: %w", id, err)
	}
	return scheduler.Cursor{Position: uint64(position), First: uint64(first), FirstStep: uint64(step)}, nil
}

// Queues implements scheduler.Reader.
func (s *Store) Queues(ctx context.Context, id string) (*runv1.Queues, error) {
	var b []byte
	err := s.db.Read.QueryRowContext(ctx, `SELECT queues FROM run WHERE run_id = ?`, id).Scan(&b)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, scheduler.ErrNotFound.With("run", id)
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
	rows, err := s.db.Read.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []*scheduler.Run
	for rows.Next() {
		run, err := one(rows)
		if err != nil {
			return nil, err
		}
		out = append(out, run)
	}
	return out, rows.Err()
}

func one(row interface{ Scan(...any) error }) (*scheduler.Run, error) {
	var record []byte
	if err := row.Scan(&record); err != nil {
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
