package sqlstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	"github.com/rollout-rl/rollout/services/storage"
	"github.com/rollout-rl/rollout/services/storage/sqlstore"
	"github.com/rollout-rl/rollout/services/storage/storetest"
)

// A worker reports every second for a day, and what is old is summarized as the service does it. At
// the end the store has single reports, seconds, and ten seconds; what one worker takes is
// multiplied.
func TestADayOfTelemetry(t *testing.T) {
	t.Parallel()
	const workers, limit, day, portion = 1000, 1_000_000_000, 24 * 3600, 600
	sqldbtest.Run(t, func(t *testing.T, at func(*testing.T) sqldb.Place) {
		place := at(t)
		store := sqldbtest.Store(t, place, sqlstore.Open)
		tiers := storage.Tiers(time.Hour, 24*time.Hour)
		empty := used(t, place)
		for from := 0; from < day; from += portion {
			if _, err := store.Append(t.Context(), storetest.Reports("run-a", "inference-0", from, from+portion)); err != nil {
				t.Fatal(err)
			}
			if err := store.Downsample(t.Context(), storetest.At(from+portion), tiers); err != nil {
				t.Fatal(err)
			}
		}
		each := used(t, place) - empty
		t.Logf("%d bytes for a day of a worker, %.2f GB for %d workers", each, float64(each*workers)/1e9, workers)
		if each*workers > limit {
			t.Errorf("a day of %d workers takes %d bytes, more than %d", workers, each*workers, limit)
		}
		reports, buckets := uint64(0), 0
		if err := store.Telemetry(t.Context(), storage.TelemetryFilter{Run: "run-a", Names: []string{"samples"}}, tiers, func(s storage.TelemetrySeries) error {
			for _, b := range s.Buckets {
				reports += b.Count
			}
			buckets += len(s.Buckets)
			return nil
		}); err != nil || reports != day || buckets != 23*360+3600 {
			t.Errorf("%d reports in %d buckets are found, %v", reports, buckets, err)
		}
	})
}

// used is the number of bytes of the tables in the database: in SQLite with free pages, in
// PostgreSQL of a fresh copy, because a transaction of another test keeps VACUUM from freeing rows.
func used(t *testing.T, place sqldb.Place) (bytes int64) {
	t.Helper()
	ctx := context.Background()
	if folder, ok := place.(sqldb.Files); ok {
		db, err := sqldb.OpenSQLite(filepath.Join(string(folder), "storage.sqlite"), sqldb.Normal)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if err := db.One(ctx, `SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()`, nil, &bytes); err != nil {
			t.Fatal(err)
		}
		return bytes
	}
	server, _ := place.(sqldb.Postgres)
	db, err := sql.Open("pgx", server.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, table := range []string{"telemetry_source", "telemetry_report", "telemetry_chunk"} {
		name, size := server.Schema("storage")+"."+table, int64(0)
		for _, statement := range []string{"CREATE TABLE %s_copy (LIKE %[1]s INCLUDING ALL EXCLUDING IDENTITY)", "INSERT INTO %s_copy SELECT * FROM %[1]s"} {
			if _, err := db.ExecContext(ctx, fmt.Sprintf(statement, name)); err != nil {
				t.Fatal(err)
			}
		}
		if err := db.QueryRowContext(ctx, "SELECT pg_total_relation_size($1::regclass)", name+"_copy").Scan(&size); err != nil {
			t.Fatal(err)
		}
		if _, err := db.ExecContext(ctx, "DROP TABLE "+name+"_copy"); err != nil {
			t.Fatal(err)
		}
		bytes += size
	}
	return bytes
}
