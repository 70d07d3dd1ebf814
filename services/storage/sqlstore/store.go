// Package sqlstore keeps events and metrics in a SQL database.
package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	schema "github.com/rollout-rl/rollout/database/storage"
	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/sqldb"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/storage"
)

// Store implements storage.Store.
type Store struct{ db *sqldb.DB }

// Open opens the database of the service, creates it if needed, and migrates its schema.
func Open(ctx context.Context, place sqldb.Place) (*Store, error) {
	// The ledgers are authoritative, so the last events before a power cut may be lost.
	db, err := sqldb.Ready(ctx, place, "storage", sqldb.Normal, schema.Migrations)
	if err != nil {
		return nil, err
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
	err = s.db.Tx(ctx, func(tx *sql.Tx) error {
		added = 0
		deleted, err := s.deleted(ctx, tx, events)
		if err != nil {
			return err
		}
		var records, reports []*storage.Event
		for _, e := range events {
			if deleted[e.GetRunId()] {
				continue
			}
			if storage.Telemetry(e.GetKind()) {
				reports = append(reports, e)
			} else {
				records = append(records, e)
			}
		}
		if err := s.report(ctx, tx, reports); err != nil || len(records) == 0 {
			return err
		}
		if err := s.db.LockTable(ctx, tx, "event"); err != nil { // a tail must not miss an event with a lower sequence that is committed later
			return err
		}
		insert, err := tx.PrepareContext(ctx, `INSERT INTO event (event_id, run_id, time_us, service, level, kind, event)
			VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (event_id) DO NOTHING`)
		if err != nil {
			return err
		}
		defer func() { _ = insert.Close() }()
		for _, e := range records {
			raw, err := proto.Marshal(e)
			if err != nil {
				return err
			}
			done, err := insert.ExecContext(ctx, sqldb.Text(e.GetEventId()), sqldb.Text(e.GetRunId()), e.GetTime().AsTime().UnixMicro(),
				sqldb.Text(e.GetService()), int32(e.GetLevel()), sqldb.Text(e.GetKind()), raw)
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

// deleted returns which runs of events are deleted.
func (s *Store) deleted(ctx context.Context, tx *sql.Tx, events []*storage.Event) (map[string]bool, error) {
	found := map[string]bool{}
	for _, e := range events {
		found[e.GetRunId()] = false
	}
	for _, run := range slices.Sorted(maps.Keys(found)) { // other transactions lock them in the same order
		err := fence.Live(ctx, tx, s.db.Dialect, run)
		if found[run] = errors.Is(err, fence.ErrDeleted); err != nil && !found[run] {
			return nil, err
		}
	}
	return found, nil
}

// measure stores the metrics of an event.
func measure(ctx context.Context, tx *sql.Tx, e *storage.Event) error {
	if !storage.Measured(e.GetKind()) {
		return nil
	}
	for name, value := range e.GetMetrics() {
		known := sql.NullFloat64{Float64: value, Valid: !math.IsNaN(value)}
		if _, err := tx.ExecContext(ctx, `INSERT INTO metric (run_id, name, step, value, time_us) VALUES ($1, $2, $3, $4, $5)
			ON CONFLICT (run_id, name, step) DO UPDATE SET value = excluded.value, time_us = excluded.time_us
			WHERE excluded.time_us >= metric.time_us`,
			sqldb.Text(e.GetRunId()), sqldb.Text(name), int64(e.GetStep()), known, e.GetTime().AsTime().UnixMicro()); err != nil {
			return err
		}
	}
	return nil
}

// List implements storage.Store.
func (s *Store) List(ctx context.Context, f storage.Filter, limit int, newest bool) ([]*storage.Event, error) {
	where, args := s.conditions(f)
	order := "ASC"
	if newest {
		order = "DESC"
	}
	args = append(args, limit)
	var events []*storage.Event
	err := s.db.Each(ctx, fmt.Sprintf(`SELECT sequence, event FROM event WHERE %s ORDER BY sequence %s LIMIT $%d`, where, order, len(args)), args,
		func(scan sqldb.Scan) error {
			var sequence int64
			var raw []byte
			if err := scan(&sequence, &raw); err != nil {
				return err
			}
			e := &storage.Event{}
			if err := proto.Unmarshal(raw, e); err != nil {
				return fmt.Errorf("read event %d: %w", sequence, err)
			}
			e.Sequence = uint64(sequence)
			events = append(events, e)
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("list events: %w", err)
	}
	if newest {
		slices.Reverse(events)
	}
	return events, nil
}

// conditions returns the WHERE clause of a filter and its arguments.
func (s *Store) conditions(f storage.Filter) (string, []any) {
	var parts []string
	var args []any
	value := func(v any) string { args = append(args, v); return fmt.Sprintf("$%d", len(args)) }
	add := func(condition string, v any) { parts = append(parts, condition+" "+value(v)) }
	add("sequence >", int64(f.After))
	if f.Before > 0 {
		add("sequence <", int64(f.Before))
	}
	if f.Run != "" {
		add("run_id =", f.Run)
	}
	if f.MinLevel > 0 {
		add("level >=", int32(f.MinLevel))
	}
	if !f.Since.IsZero() {
		add("time_us >=", f.Since.UnixMicro())
	}
	if len(f.Kinds) > 0 {
		parts = append(parts, "kind IN ("+each(f.Kinds, value)+")")
	}
	var services []string
	for _, name := range f.Services {
		services = append(services, "service = "+value(name),
			fmt.Sprintf("substr(service, 1, %d) = %s", len(name)+1, value(name+"/")))
	}
	if len(services) > 0 {
		parts = append(parts, "("+strings.Join(services, " OR ")+")")
	}
	return strings.Join(parts, " AND "), args
}

// each joins the placeholders of a list.
func each(list []string, value func(any) string) string {
	out := make([]string, len(list))
	for i, v := range list {
		out[i] = value(v)
	}
	return strings.Join(out, ", ")
}

// Series implements storage.Store.
func (s *Store) Series(ctx context.Context, q storage.MetricQuery) ([]*storagev1.Series, error) {
	args := []any{q.Run, int64(q.From)}
	value := func(v any) string { args = append(args, v); return fmt.Sprintf("$%d", len(args)) }
	query := `SELECT name, step, value, time_us FROM metric WHERE run_id = $1 AND step >= $2`
	if len(q.Names) > 0 {
		query += " AND name IN (" + each(q.Names, value) + ")"
	}
	if q.After != nil {
		query += " AND (name, step) > (" + value(sqldb.Text(q.After.Name)) + ", " + value(int64(q.After.Step)) + ")"
	}
	query += " ORDER BY name, step LIMIT " + value(q.Limit)
	var all []*storagev1.Series
	err := s.db.Each(ctx, query, args, func(scan sqldb.Scan) error {
		var name string
		var step, us int64
		var value sql.NullFloat64
		if err := scan(&name, &step, &value, &us); err != nil {
			return err
		}
		if !value.Valid {
			value.Float64 = math.NaN()
		}
		if len(all) == 0 || all[len(all)-1].GetName() != name {
			all = append(all, &storagev1.Series{Name: name})
		}
		last := all[len(all)-1]
		last.Points = append(last.Points, &storagev1.Point{Step: uint64(step), Value: value.Float64, Time: timestamppb.New(time.UnixMicro(us).UTC())})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("query metrics of %s: %w", q.Run, err)
	}
	return all, nil
}

var _ storage.Store = (*Store)(nil)
