package sqldb_test

import (
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

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

var failovers = flag.Int("failovers", 2, "how often TestPostgresFailovers replaces the primary")

// Four writers count in transactions while the primary is killed and its standby promoted, again
// and again. Each transaction that returned took place once, and none failed for good.
func TestPostgresFailovers(t *testing.T) {
	sqldbtest.Require(t)
	const writers = 4
	primary, err := sqldbtest.Start()
	if err != nil {
		t.Fatal(err)
	}
	wire := newWire(t, primary.URL)
	db := migrate(t, sqldbtest.Open(t, sqldb.Postgres{URL: wire.url, Prefix: "t"}, "x"))
	if _, err := db.Exec(t.Context(), "DELETE FROM parent"); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var done, again [writers]int
	var running sync.WaitGroup
	for w := range writers {
		running.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				next := done[w] + 1
				err := db.Tx(t.Context(), func(tx *sql.Tx) error { // fails if it is repeated after it took place
					_, err := tx.ExecContext(t.Context(), "INSERT INTO parent (id) VALUES ($1)", writers*next+w)
					return err
				})
				switch {
				case err == nil:
					done[w] = next
				case errors.Is(err, sqldb.ErrUnavailable):
					again[w]++
				case errors.Is(err, sqldb.ErrUnknown): // no server answered for ten seconds
					t.Errorf("writer %d: unknown: %v", w, err)
					return
				default:
					t.Errorf("writer %d: %v", w, err)
					return
				}
			}
		})
	}
	for n := range *failovers {
		standby, err := primary.Standby(t.Context(), fmt.Sprintf("standby%d", n))
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Duration(rand.IntN(300)) * time.Millisecond)
		primary.Kill()
		if err := standby.Promote(t.Context()); err != nil {
			t.Fatal(err)
		}
		wire.lead(standby.URL)
		primary = standby
		if t.Failed() {
			break
		}
	}
	close(stop)
	running.Wait()
	total := 0
	for w := range writers {
		total += done[w]
		var n int
		if err := db.One(t.Context(), fmt.Sprintf("SELECT count(*) FROM parent WHERE id %% %d = %d", writers, w), nil, &n); err != nil || n != done[w] {
			t.Errorf("writer %d: %d transactions took place, %d returned: %v", w, n, done[w], err)
		}
	}
	t.Logf("%d failovers, %d transactions, %d calls found no primary for five seconds and were repeated", *failovers, total, again[0]+again[1]+again[2]+again[3])
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
