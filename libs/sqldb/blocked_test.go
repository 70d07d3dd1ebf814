package sqldb_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

// holding runs a statement in a transaction that stays open, as of someone who went to lunch, and
// returns its backend.
func holding(t *testing.T, statement string) (pid int) {
	t.Helper()
	config, err := pgx.ParseConfig(sqldbtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	config.RuntimeParams["application_name"] = "migration"
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	for _, s := range []string{"BEGIN", statement} {
		if _, err := conn.Exec(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	return int(conn.PgConn().PID())
}

// A call that gives up because another session has a lock names it, also where the deadline of the
// caller is the one that passes.
func TestTheSessionThatHoldsALockIsNamed(t *testing.T) {
	t.Parallel()
	sqldbtest.Require(t)
	for name, c := range map[string]struct {
		statement string // of the other session, with the schema
		timeout   time.Duration
		deadline  time.Duration
	}{
		"a table, until the statement's timeout": {"LOCK TABLE %s.parent IN ACCESS EXCLUSIVE MODE", 1500 * time.Millisecond, time.Minute},
		"a table, until the caller's deadline":   {"LOCK TABLE %s.parent IN ACCESS EXCLUSIVE MODE", 30 * time.Second, 3500 * time.Millisecond},
		"a row":                                  {"DELETE FROM %s.parent WHERE id = 1", 1500 * time.Millisecond, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			place := sqldbtest.Place(t)
			place.StatementTimeout = c.timeout
			db := migrate(t, sqldbtest.Open(t, place, "ledger"))
			if err := db.Tx(t.Context(), insert(t.Context(), 7)); err != nil {
				t.Fatal(err)
			}
			table := place.Schema("ledger") + ".parent"
			pid := holding(t, fmt.Sprintf(c.statement, place.Schema("ledger")))
			ctx, cancel := context.WithTimeout(t.Context(), c.deadline)
			defer cancel()
			_, err := db.Exec(ctx, "UPDATE parent SET id = id")
			if !errors.Is(err, sqldb.ErrTimeout) {
				t.Fatalf("got %v", err)
			}
			for _, word := range []string{table, fmt.Sprintf("pid %d", pid), "application migration", "idle in transaction", "last statement: "} {
				if !strings.Contains(rpcerr.Text(err), word) {
					t.Errorf("%q does not name %q", rpcerr.Text(err), word)
				}
			}
			if fix := rpcerr.Fix(err); !strings.Contains(fix, fmt.Sprintf("SELECT pg_terminate_backend(%d)", pid)) {
				t.Errorf("the fix is %q", fix)
			}
			admin(t, fmt.Sprintf("SELECT pg_terminate_backend(%d)", pid))
			if _, err := db.Exec(t.Context(), "UPDATE parent SET id = id"); err != nil {
				t.Errorf("after the fix: %v", err)
			}
		})
	}
}

// What looks for locks ends with the call, also if that panics.
func TestAPanicEndsTheLookForLocks(t *testing.T) { // not parallel: it sees all goroutines
	sqldbtest.Require(t)
	place := sqldbtest.Place(t)
	place.StatementTimeout = 200 * time.Millisecond
	db := migrate(t, sqldbtest.Open(t, place, "ledger"))
	func() {
		defer func() { _ = recover() }()
		_ = db.Tx(t.Context(), func(*sql.Tx) error {
			<-time.After(300 * time.Millisecond)
			panic("in a handler")
		})
	}()
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(50 * time.Millisecond) {
		stacks := make([]byte, 1<<22)
		if !strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "(*server).follow") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("it looks for locks still")
		}
	}
}

// Any service can list what waits for a lock, in the databases of all of them.
func TestWhoWaitsForALockIsListed(t *testing.T) {
	t.Parallel()
	place := sqldbtest.Place(t)
	waits, asks := migrate(t, sqldbtest.Open(t, place, "ledger")), sqldbtest.Open(t, place, "asks")
	table := place.Schema("ledger") + ".parent"
	pid := holding(t, "LOCK TABLE "+table+" IN ACCESS EXCLUSIVE MODE")
	done := make(chan error)
	go func() {
		_, err := waits.Exec(t.Context(), "UPDATE parent SET id = id")
		done <- err
	}()
	for {
		all, err := asks.Blocked(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if i := find(all, table); i >= 0 {
			if b := all[i]; b.PID != pid || b.Service != "ledger" || b.Session == "" {
				t.Errorf("got %+v", b)
			}
			break
		}
		<-time.After(10 * time.Millisecond)
	}
	if all, err := sqldbtest.Open(t, sqldbtest.Place(t), "other").Blocked(t.Context()); err != nil || len(all) > 0 {
		t.Errorf("another deployment in the same database lists %+v, %v", all, err)
	}
	admin(t, fmt.Sprintf("SELECT pg_terminate_backend(%d)", pid))
	if err := <-done; err != nil {
		t.Error(err)
	}
	<-time.After(2 * time.Second) // its answer is shared for so long
	if all, err := asks.Blocked(t.Context()); err != nil || find(all, table) >= 0 {
		t.Errorf("after the lock: %+v, %v", all, err)
	}
}

func find(all []sqldb.Blocked, table string) int {
	for i, b := range all {
		if b.Table == table {
			return i
		}
	}
	return -1
}
