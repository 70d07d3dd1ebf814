// Package sqlite keeps events and metrics in one SQLite file.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/storage"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/services/storage"
)

// Store implements storage.Store.
type Store struct{ db *sqldb.SQLite }

// Open opens or makes the database at path and brings its schema up to date.
func Open(ctx context.Context, path string) (*Store, error) {
	// Events tell of what the ledgers hold; the last ones before a power cut may be lost.
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

// Append implements storage.Store.
func (s *Store) Append(ctx context.Context, events []*storage.Event) (added int, err error) {
	if len(events) == 0 {
		return 0, nil
	}
	err = sqldb.Tx(ctx, s.db, func(tx *sql.Tx) error {
		insert, err := tx.PrepareContext(ctx, `INSERT INTO event (event_id, run_id, time_us, service, level, kind, event)
			VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (event_id) DO NOTHING`)
		if err != nil {
			return err
		}
		defer func() { _ = insert.Close() }()
		added = 0
		for _, e := range events {
			raw, err := proto.Marshal(e)
			if err != nil {
				return err
			}
			done, err := insert.ExecContext(ctx, e.GetEventId(), e.GetRunId(), e.GetTime().AsTime().UnixMicro(), e.GetService(), int32(e.GetLevel()), e.GetKind(), raw)
			if err != nil {
				return err
			}
			if n, err := done.RowsAffected(); err != nil || n == 0 {
				if err != nil {
					return err
				}
				continue
			}
			added++
			if err := measure(ctx, tx, e); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("store %d events: %w", len(events), err)
	}
	return added, nil
}

func measure(ctx context.Context, tx *sql.Tx, e *storage.Event) error {
	if !storage.Measured(e.GetKind()) {
		return nil
	}
	for name, value := range e.GetMetrics() {
		known := sql.NullFloat64{Float64: value, Valid: !math.IsNaN(value)}
		if _, err := tx.ExecContext(ctx, `INSERT INTO metric (run_id, name, step, value, time_us) VALUES (?, ?, ?, ?, ?)
			ON CONFLICT (run_id, name, step) DO UPDATE SET value = excluded.value, time_us = excluded.time_us
			WHERE excluded.time_us >= metric.time_us`,
			e.GetRunId(), name, int64(e.GetStep()), known, e.GetTime().AsTime().UnixMicro()); err != nil {
			return err
		}
	}
	return nil
}

// List implements storage.Store.
func (s *Store) List(ctx context.Context, f storage.Filter, limit int, newest bool) ([]*storage.Event, error) {
	where, args := conditions(f)
	order := "ASC"
	if newest {
		order = "DESC"
	}
	rows, err := s.db.Read.QueryContext(ctx, `SELECT sequence, event FROM event WHERE `+where+` ORDER BY sequence `+order+` LIMIT ?`, append(args, limit)...)
	if err != nil {
		return nil, fmt.Errorf("list events: %w", err)
	}
	defer func() { _ = rows.Close() }()
	var events []*storage.Event
	for rows.Next() {
		var sequence int64
		var raw []byte
		if err := rows.Scan(&sequence, &raw); err != nil {
			return nil, fmt.Errorf("list events: %w", err)
		}
		e := &storage.Event{}
		if err := proto.Unmarshal(raw, e); err != nil {
			return nil, fmt.Errorf("read event %d: %w", sequence, err)
		}
		e.Sequence = uint64(sequence)
		events = append(events, e)
	}
	if newest {
		slices.Reverse(events)
	}
	return events, rows.Err()
}

func conditions(f storage.Filter) (string, []any) {
	parts, args := []string{"sequence > ?"}, []any{int64(f.After)}
	add := func(condition string, values ...any) {
		parts, args = append(parts, condition), append(args, values...)
	}
	if f.Run != "" {
		add("run_id = ?", f.Run)
	}
	if f.MinLevel > 0 {
		add("level >= ?", int32(f.MinLevel))
	}
	if !f.Since.IsZero() {
		add("time_us >= ?", f.Since.UnixMicro())
	}
	if len(f.Kinds) > 0 {
		add("kind IN (?"+strings.Repeat(", ?", len(f.Kinds)-1)+")", anys(f.Kinds)...)
	}
	var services []string
	var names []any
	for _, name := range f.Services {
		services = append(services, "service = ?", "substr(service, 1, ?) = ?")
		names = append(names, name, len(name)+1, name+"/")
	}
	if len(services) > 0 {
		add("("+strings.Join(services, " OR ")+")", names...)
	}
	return strings.Join(parts, " AND "), args
}

func anys(list []string) []any {
	out := make([]any, len(list))
	for i, v := range list {
		out[i] = v
	}
	return out
}

var _ storage.Store = (*Store)(nil)
