package sqldb

import (
	"database/sql"
	"errors"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// A caller repeats what failed because another process had the lock, and is shown how to find it.
func TestALockedDatabase(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "db.sqlite")
	begin := func() error {
		db, err := sql.Open("sqlite", file)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = db.Close() })
		_, err = db.Exec("BEGIN EXCLUSIVE")
		return err
	}
	if err := begin(); err != nil {
		t.Fatal(err)
	}
	err := sqliteError(begin())
	if !errors.Is(err, ErrLocked) || rpcerr.Code(err) != codes.Unavailable || rpcerr.Fix(err) == "" {
		t.Errorf("got %v", err)
	}
}
