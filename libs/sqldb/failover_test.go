package sqldb_test

import (
	"database/sql"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

// The primary is lost while it commits, and its synchronous standby is promoted. The transaction
// takes place once, whether its commit had reached the standby or not. If it had not, the new
// primary gives its number to another transaction, which must not be mistaken for it.
func TestPostgresFailoverDuringCommit(t *testing.T) {
	t.Parallel()
	sqldbtest.Require(t)
	for _, arrives := range []bool{true, false} {
		t.Run(fmt.Sprintf("arrives=%v", arrives), func(t *testing.T) {
			t.Parallel()
			primary, err := sqldbtest.Start()
			if err != nil {
				t.Fatal(err)
			}
			wire := newWire(t, primary.URL)
			db := migrate(t, sqldbtest.Open(t, sqldb.Postgres{URL: wire.url, Prefix: "t"}, "x"))
			standby, err := primary.Standby(t.Context(), "standby")
			if err != nil {
				t.Fatal(err)
			}
			tries := 0
			err = db.Tx(t.Context(), func(tx *sql.Tx) error {
				if tries++; tries > 1 {
					_, err := tx.ExecContext(t.Context(), "UPDATE parent SET id = id + 1")
					return err
				}
				if _, err := tx.ExecContext(t.Context(), "UPDATE parent SET id = id + 1"); err != nil {
					return err
				}
				var xid string
				if err := tx.QueryRowContext(t.Context(), "SELECT pg_current_xact_id()::text").Scan(&xid); err != nil {
					return err
				}
				wire.fail(arrives, func() error {
					primary.Kill()
					if err := standby.Promote(t.Context()); err != nil {
						return err
					}
					return reach(t, standby.URL, xid)
				}, standby.URL)
				return nil
			})
			want := 1
			if !arrives {
				want = 2
			}
			if err != nil || tries != want {
				t.Errorf("%d tries, want %d: %v", tries, want, err)
			}
			var n int
			if err := db.One(t.Context(), "SELECT id FROM parent", nil, &n); err != nil || n != 2 {
				t.Errorf("counted to %d, want 2: %v", n, err)
			}
		})
	}
}

// reach commits transactions until one with the number xid or a later one was committed.
func reach(t *testing.T, server, xid string) error {
	conn, err := pgx.Connect(t.Context(), server)
	if err != nil {
		return err
	}
	defer conn.Close(t.Context())
	for reached := false; !reached; {
		if err := conn.QueryRow(t.Context(), "SELECT pg_current_xact_id() >= $1::text::xid8", xid).Scan(&reached); err != nil {
			return err
		}
	}
	return nil
}
