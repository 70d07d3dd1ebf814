package sqlstore

import (
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/services/storage"
)

// source is a worker with the names of its numbers.
type source struct {
	id      int64
	service string
	names   []string
}

// reportsInserted is how many reports one statement inserts.
const reportsInserted = 500

// report stores what workers report of one second each. A report that arrives twice is stored once.
func (s *Store) report(ctx context.Context, tx *sql.Tx, events []*storage.Event) error {
	known := map[string]int64{} // sources of these events
	var args []any
	flush := func() error {
		if len(args) == 0 {
			return nil
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO telemetry_report (source_id, time_ms, data) VALUES `+s.db.Rows(len(args)/3, 3)+` ON CONFLICT DO NOTHING`, args...)
		args = nil
		return err
	}
	for _, e := range events {
		names := slices.Sorted(maps.Keys(e.GetMetrics()))
		if len(names) == 0 {
			continue
		}
		data := make([]byte, 0, 4*len(names))
		for _, name := range names {
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(e.GetMetrics()[name])))
		}
		run, service, text := sqldb.Text(e.GetRunId()), sqldb.Text(e.GetService()), sqldb.Text(strings.Join(names, "\n"))
		key := strings.Join([]string{run, service, text}, "\x00")
		id, found := known[key]
		if !found {
			var err error
			if id, err = sourceOf(ctx, tx, run, service, text); err != nil {
				return err
			}
			known[key] = id
		}
		if args = append(args, id, e.GetTime().AsTime().UnixMilli(), data); len(args) == 3*reportsInserted {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}

func sourceOf(ctx context.Context, tx *sql.Tx, run, service, names string) (id int64, err error) {
	find := func() error {
		return tx.QueryRowContext(ctx, `SELECT source_id FROM telemetry_source WHERE run_id = $1 AND service = $2 AND names = $3`, run, service, names).Scan(&id)
	}
	if err := find(); !errors.Is(err, sql.ErrNoRows) {
		return id, err
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO telemetry_source (run_id, service, names) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING`, run, service, names); err != nil {
		return 0, err
	}
	return id, find()
}

// sourcesRead is how many sources are read at a time.
const sourcesRead = 200

// sources calls visit with the sources of a run, or with all, one page at a time.
func (s *Store) sources(ctx context.Context, run string, visit func(source) error) error {
	for after := int64(0); ; {
		var page []source
		where, args := "source_id > $1", []any{after}
		if run != "" {
			where, args = where+" AND run_id = $2", append(args, run)
		}
		err := s.db.Each(ctx, fmt.Sprintf(`SELECT source_id, service, names FROM telemetry_source WHERE %s ORDER BY source_id LIMIT %d`, where, sourcesRead), args,
			func(scan sqldb.Scan) error {
				var one source
				var names string
				err := scan(&one.id, &one.service, &names)
				one.names = strings.Split(names, "\n")
				page = append(page, one)
				return err
			})
		if err != nil {
			return err
		}
		for _, one := range page {
			if err := visit(one); err != nil {
				return err
			}
			after = one.id
		}
		if len(page) < sourcesRead {
			return nil
		}
	}
}

// Downsample implements storage.Store. It moves one row of a source in a transaction.
func (s *Store) Downsample(ctx context.Context, now time.Time, tiers []storage.Tier) error {
	err := s.sources(ctx, "", func(from source) error {
		for i, to := range tiers {
			before := int64(0) // the reports
			if i > 0 {
				before = tiers[i-1].Seconds
			}
			for {
				moved, err := s.move(ctx, from, before, to, now.Add(-to.After).Unix())
				if err != nil {
					return fmt.Errorf("source %d: %w", from.id, err)
				}
				if !moved {
					break
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("summarize telemetry: %w", err)
	}
	return nil
}

// move summarizes the oldest rows of one resolution that fit into one row of the next. Without a
// whole row that ended before a time it moves nothing.
func (s *Store) move(ctx context.Context, from source, seconds int64, to storage.Tier, until int64) (bool, error) {
	oldest, err := s.oldest(ctx, from.id, seconds)
	if err != nil || oldest == nil {
		return false, err
	}
	start := *oldest - *oldest%to.Chunk
	end := start + to.Chunk
	if end > until {
		return false, nil
	}
	return true, s.db.Tx(ctx, func(tx *sql.Tx) error {
		parts, err := rows(ctx, tx, from, seconds, start, end)
		if err != nil {
			return err
		}
		old, err := rows(ctx, tx, from, to.Seconds, start, start+1) // of reports that came late
		if err != nil {
			return err
		}
		data := storage.Join(append(old, parts...), len(from.names), to.Seconds).Encode(start, to.Seconds)
		if _, err := tx.ExecContext(ctx, `INSERT INTO telemetry_chunk (source_id, resolution_s, start_s, data) VALUES ($1, $2, $3, $4)
			ON CONFLICT (source_id, resolution_s, start_s) DO UPDATE SET data = excluded.data`, from.id, to.Seconds, start, data); err != nil {
			return err
		}
		if seconds == 0 {
			_, err = tx.ExecContext(ctx, `DELETE FROM telemetry_report WHERE source_id = $1 AND time_ms >= $2 AND time_ms < $3`, from.id, 1000*start, 1000*end)
			return err
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM telemetry_chunk WHERE source_id = $1 AND resolution_s = $2 AND start_s >= $3 AND start_s < $4`, from.id, seconds, start, end)
		return err
	})
}

// oldest is the time of the oldest row of a source at a resolution, in seconds; nil: it has none.
func (s *Store) oldest(ctx context.Context, id, seconds int64) (*int64, error) {
	var first sql.NullInt64
	if seconds == 0 {
		err := s.db.One(ctx, `SELECT min(time_ms) / 1000 FROM telemetry_report WHERE source_id = $1`, []any{id}, &first)
		return nullable(first), err
	}
	err := s.db.One(ctx, `SELECT min(start_s) FROM telemetry_chunk WHERE source_id = $1 AND resolution_s = $2`, []any{id, seconds}, &first)
	return nullable(first), err
}

func nullable(v sql.NullInt64) *int64 {
	if !v.Valid {
		return nil
	}
	return &v.Int64
}

// querier is a transaction, or the part of it that reads.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// rows reads the rows of a source at a resolution that start in [start, end).
func rows(ctx context.Context, tx querier, of source, seconds, start, end int64) (found []storage.Readings, err error) {
	query, args := `SELECT start_s, data FROM telemetry_chunk WHERE source_id = $1 AND start_s >= $2 AND start_s < $3 AND resolution_s = $4 ORDER BY start_s`, []any{of.id, start, end, seconds}
	if seconds == 0 {
		query, args = `SELECT time_ms, data FROM telemetry_report WHERE source_id = $1 AND time_ms >= $2 AND time_ms < $3 ORDER BY time_ms`, []any{of.id, 1000 * start, 1000 * end}
	}
	got, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, got.Close()) }()
	for got.Next() {
		var at int64
		var data []byte
		if err := got.Scan(&at, &data); err != nil {
			return nil, err
		}
		if seconds == 0 {
			found = append(found, storage.Report(time.UnixMilli(at), numbers(data, len(of.names))))
			continue
		}
		part, err := storage.Decode(data, len(of.names), at, seconds)
		if err != nil {
			return nil, fmt.Errorf("row %d of resolution %d: %w", at, seconds, err)
		}
		found = append(found, part)
	}
	return found, got.Err()
}

// numbers are the values of a report.
func numbers(data []byte, n int) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = math.NaN()
		if len(data) >= 4*(i+1) {
			out[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:])))
		}
	}
	return out
}

// distantFuture is after every report, in seconds since 1970, and fits in milliseconds.
const distantFuture = 1 << 40

// Telemetry implements storage.Store.
func (s *Store) Telemetry(ctx context.Context, f storage.TelemetryFilter, tiers []storage.Tier, visit func(storage.TelemetrySeries) error) error {
	since, until := int64(0), int64(distantFuture)
	if !f.Since.IsZero() {
		since = f.Since.Unix()
	}
	if !f.Until.IsZero() {
		until = f.Until.Unix()
	}
	err := s.sources(ctx, f.Run, func(of source) error {
		if len(f.Services) > 0 && !slices.Contains(f.Services, of.service) {
			return nil
		}
		var parts []storage.Readings
		if err := s.db.View(ctx, func(tx *sql.Tx) error { // one state, while rows move
			parts = nil
			reach := int64(0)
			if len(tiers) > 0 {
				reach = tiers[len(tiers)-1].Chunk
			}
			for _, seconds := range append([]int64{0}, resolutions(tiers)...) {
				from := since
				if seconds > 0 {
					from = max(0, since-reach) // a row may begin before
				}
				some, err := rows(ctx, tx, of, seconds, from, until)
				if err != nil {
					return err
				}
				parts = append(parts, some...)
			}
			return nil
		}); err != nil {
			return err
		}
		all := storage.Join(parts, len(of.names), f.Seconds)
		for i, name := range of.names {
			buckets := slices.DeleteFunc(all.Values[i], func(b storage.Bucket) bool { return b.Start+b.Seconds <= since || b.Start >= until })
			if len(buckets) == 0 || len(f.Names) > 0 && !slices.Contains(f.Names, name) {
				continue
			}
			if err := visit(storage.TelemetrySeries{Service: of.service, Name: name, Buckets: buckets}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("query telemetry of %s: %w", f.Run, err)
	}
	return nil
}

func resolutions(tiers []storage.Tier) []int64 {
	out := make([]int64, len(tiers))
	for i, tier := range tiers {
		out[i] = tier.Seconds
	}
	return out
}

// deleteTelemetry deletes the telemetry of a run, in transactions of bounded size.
func (s *Store) deleteTelemetry(ctx context.Context, run string) error {
	for _, statement := range []string{
		`DELETE FROM telemetry_report WHERE (source_id, time_ms) IN (SELECT r.source_id, r.time_ms FROM telemetry_source s
			JOIN telemetry_report r ON r.source_id = s.source_id WHERE s.run_id = $1 LIMIT %d)`,
		`DELETE FROM telemetry_chunk WHERE (source_id, resolution_s, start_s) IN (SELECT c.source_id, c.resolution_s, c.start_s FROM telemetry_source s
			JOIN telemetry_chunk c ON c.source_id = s.source_id WHERE s.run_id = $1 LIMIT %d)`,
		`DELETE FROM telemetry_source WHERE source_id IN (SELECT source_id FROM telemetry_source WHERE run_id = $1 LIMIT %d)`,
	} {
		if err := s.repeat(ctx, fmt.Sprintf(statement, deleteRows), run); err != nil {
			return err
		}
	}
	return nil
}
