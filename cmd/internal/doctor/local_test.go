package doctor

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/sqldb"
)

// The checks find what would stop an embedded rolloutd: a truncated database, a token that others
// can read, a port that is in use.
func TestLocal(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // a test
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	c := config.Default(t.TempDir())
	path := filepath.Join(c.StateDir, "db", "buffer.sqlite")
	db, err := sqldb.OpenSQLite(path, sqldb.Full)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(t.Context(), "CREATE TABLE t (a BLOB)"); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	look := func() []Finding {
		var r report
		local(t.Context(), Input{Config: c}, &r)
		return r.list
	}
	for _, f := range look() {
		if f.Status != OK {
			t.Errorf("%+v", f)
		}
	}
	if err := os.Truncate(path, 4096); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(c.StateDir, "token"), []byte("x\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	c.Gateway.Listen = taken.Addr().String()
	failed := ""
	for _, f := range look() {
		if f.Status == Failed && f.Fix != "" {
			failed += f.Check + " "
		}
	}
	if strings.TrimSpace(failed) != "token buffer.sqlite gateway.listen" {
		t.Errorf("failed: %s", failed)
	}
}

// A damaged page in the middle is found too, although the schema can be read. A database that is
// too slow to read is not reported as damaged.
func TestAPageOfADatabase(t *testing.T) {
	t.Parallel()
	c := config.Default(t.TempDir())
	path := filepath.Join(c.StateDir, "db", "buffer.sqlite")
	db, err := sqldb.OpenSQLite(path, sqldb.Full)
	if err != nil {
		t.Fatal(err)
	}
	for _, statement := range []string{
		"CREATE TABLE t (a BLOB)", "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000) INSERT INTO t SELECT randomblob(500) FROM n",
	} {
		if _, err := db.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	look := func(ctx context.Context) Finding {
		var r report
		local(ctx, Input{Config: c}, &r)
		return r.list[slices.IndexFunc(r.list, func(f Finding) bool { return f.Check == "buffer.sqlite" })]
	}
	if got := look(t.Context()); got.Status != OK {
		t.Errorf("%+v", got)
	}
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if got := look(late); got.Status != Warning || !strings.Contains(got.Fix, "PRAGMA quick_check") {
		t.Errorf("%+v", got)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(make([]byte, 4096), 40*4096); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if got := look(t.Context()); got.Status != Failed || !strings.Contains(got.Fix, "restore the state folder from a backup") {
		t.Errorf("%+v", got)
	}
}
