package sqldb

import (
	"bufio"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
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
	err := sqliteError(begin(), file)
	if !errors.Is(err, ErrLocked) || rpcerr.Code(err) != codes.Unavailable || rpcerr.Fix(err) == "" {
		t.Errorf("got %v", err)
	}
}

// The process that has locked a database is named, in both modes of its journal.
func TestTheProcessThatHasLockedADatabaseIsNamed(t *testing.T) {
	if file := os.Getenv("ROLLOUT_TEST_LOCKS"); file != "" { // that process
		db, err := sql.Open("sqlite", file)
		if err == nil {
			_, err = db.Exec("BEGIN IMMEDIATE")
		}
		fmt.Println("locked", err)
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test has ended
		os.Exit(0)
	}
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux lists the locks of files")
	}
	for _, journal := range []string{"WAL", "DELETE"} {
		file := filepath.Join(t.TempDir(), "db.sqlite")
		db, err := sql.Open("sqlite", file)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		db.SetMaxOpenConns(1)
		for _, statement := range []string{"PRAGMA journal_mode = " + journal, "CREATE TABLE t (x)"} {
			if _, err := db.Exec(statement); err != nil {
				t.Fatal(err)
			}
		}
		holder := exec.Command(os.Args[0], "-test.run=^TestTheProcessThatHasLockedADatabaseIsNamed$")
		holder.Env = append(os.Environ(), "ROLLOUT_TEST_LOCKS="+file)
		in, _ := holder.StdinPipe()
		out, _ := holder.StdoutPipe()
		if err := holder.Start(); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "locked <nil>\n" {
			t.Fatalf("%q, %v", line, err)
		}
		_, err = db.Exec("INSERT INTO t VALUES (1)")
		err = sqliteError(err, file)
		if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), fmt.Sprintf("process %d (`", holder.Process.Pid)) || !strings.Contains(rpcerr.Fix(err), fmt.Sprint("kill ", holder.Process.Pid)) {
			t.Errorf("%s: got %v; fix: %s", journal, err, rpcerr.Fix(err))
		}
		in.Close()
		_ = holder.Wait()
	}
}
