package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Series implements storage.Store.
func (s *Store) Series(ctx context.Context, run string, names []string, from uint64) ([]*storagev1.Series, error) {
	query, args := `SELECT name, step, value, time_us FROM metric WHERE run_id = ? AND step >= ?`, []any{run, int64(from)}
	if len(names) > 0 {
		query += ` AND name IN (?` + strings.Repeat(", ?", len(names)-1) + `)`
		args = append(args, anys(names)...)
	}
	rows, err := s.db.Read.QueryContext(ctx, query+` ORDER BY name, step`, args...)
	if err != nil {
		return nil, fmt.Errorf("query metrics of %s: %w", run, err)
	}
	defer func() { _ = rows.Close() }()
	var all []*storagev1.Series
	for rows.Next() {
		var name string
		var step, us int64
		var value sql.NullFloat64
		if err := rows.Scan(&name, &step, &value, &us); err != nil {
			return nil, fmt.Errorf("query metrics of %s: %w", run, err)
		}
		if !value.Valid {
			value.Float64 = math.NaN()
		}
		if len(all) == 0 || all[len(all)-1].GetName() != name {
			all = append(all, &storagev1.Series{Name: name})
		}
		last := all[len(all)-1]
		last.Points = append(last.Points, &storagev1.Point{Step: uint64(step), Value: value.Float64, Time: timestamppb.New(time.UnixMicro(us).UTC())})
	}
	return all, rows.Err()
}
