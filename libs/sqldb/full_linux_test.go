package sqldb_test

import (
	"path/filepath"
	"testing"

	"github.com/rollout-rl/rollout/libs/disk/disktest"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// A full disk fails a write transaction with DISK_FULL and damages nothing: rows can be read, and
// writes continue when there is space.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	small := disktest.Mount(t, "4m")
	db := migrate(t, open(t, filepath.Join(small.Dir, "db.sqlite")))
	small.Fill(0)
	var err error
	n := 10
	for ; err == nil && n < 10_000; n++ { // the -wal file has space for some
		err = db.Tx(t.Context(), insert(t.Context(), n))
	}
	if !rpcerr.DiskFull(err) || rpcerr.Fix(err) == "" {
		t.Fatalf("write on a full disk: %v", err)
	}
	if _, err := db.Exec(t.Context(), "UPDATE parent SET id = id + 1000000"); !rpcerr.DiskFull(err) {
		t.Errorf("statement on a full disk: %v", err)
	}
	before := count(t, db, "parent")
	small.Free()
	if err := db.Tx(t.Context(), insert(t.Context(), n)); err != nil {
		t.Fatalf("write when there is space: %v", err)
	}
	if after := count(t, db, "parent"); after != before+1 {
		t.Errorf("%d rows became %d", before, after)
	}
	if err := db.Whole(t.Context()); err != nil {
		t.Error(err)
	}
}
