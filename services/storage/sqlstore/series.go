package sqlstore

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/sqldb"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Series implements storage.Store.
func (s *Store) Series(ctx context.Context, run string, names []string, from uint64) ([]*storagev1.Series, error) {
	args := []any{run, int64(from)}
	query := `SELECT name, step, value, time_us FROM metric WHERE run_id = $1 AND step >= $2`
	if len(names) > 0 {
		query += " AND name IN (" + each(names, func(v any) string { args = append(args, v); return fmt.Sprintf("$%d", len(args)) }) + ")"
	}
	var all []*storagev1.Series
	err := s.db.Each(ctx, query+` ORDER BY name, step`, args, func(scan sqldb.Scan) error {
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
		return nil, fmt.Errorf("query metrics of %s: %w", run, err)
	}
	return all, nil
}
