package doctor

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/sqldb"
)

// What stops an embedded rolloutd is found before: a database that is cut off, a token that others read, a port that is taken.
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
		local(t.Context(), Patient{Config: c}, &r)
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
		if f.Status == Failed && f.Mend != "" {
			failed += f.Check + " "
		}
	}
	if strings.TrimSpace(failed) != "token buffer.sqlite gateway.listen" {
		t.Errorf("failed: %s", failed)
	}
}
