package sqldb_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

// admin runs statements as the superuser.
func admin(t *testing.T, statements ...string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), sqldbtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	for _, s := range statements {
		if _, err := conn.Exec(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// as is the same server with another user.
func as(t *testing.T, p sqldb.Postgres, user string) sqldb.Postgres {
	t.Helper()
	u, err := url.Parse(p.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User(user)
	p.URL = u.String()
	return p
}

func TestPostgresServicesAreApart(t *testing.T) {
	t.Parallel()
	place := sqldbtest.Place(t)
	one, two := migrate(t, sqldbtest.Open(t, place, "one")), migrate(t, sqldbtest.Open(t, place, "two"))
	if err := one.Tx(t.Context(), insert(t.Context(), 2)); err != nil {
		t.Fatal(err)
	}
	if n := count(t, two, "parent"); n != 1 {
		t.Errorf("a row of one service in the other: %d rows", n)
	}
	_, err := two.Exec(t.Context(), "SELECT 1 FROM "+place.Schema("one")+".parent")
	if err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("one service reads the other's table: %v", err)
	}
}

// A user without the right to create roles and schemas gets an error with the missing statements,
// and succeeds once they were run.
func TestPostgresOrdinaryUser(t *testing.T) {
	t.Parallel()
	place := sqldbtest.Place(t)
	user, schema := place.Prefix+"_user", place.Schema("x")
	admin(t, "CREATE ROLE "+user+" LOGIN")
	ordinary := as(t, place, user)
	_, err := ordinary.Open(t.Context(), "x", sqldb.Full)
	if !errors.Is(err, sqldb.ErrRole) {
		t.Fatalf("got %v", err)
	}
	_, statements, found := strings.Cut(err.Error(), "run as an administrator: ")
	if !found {
		t.Fatalf("no statements in %q", err)
	}
	admin(t, statements)
	migrate(t, sqldbtest.Open(t, ordinary, "x"))
	if !strings.Contains(statements, schema) {
		t.Errorf("%q", statements)
	}
}

// A dump that was restored on a server without its roles has schemas that belong to the user that
// restored them.
func TestPostgresRestoredWithoutRoles(t *testing.T) {
	t.Parallel()
	place := sqldbtest.Place(t)
	admin(t, "CREATE SCHEMA "+place.Schema("x"))
	for _, made := range []bool{false, true} {
		if made {
			admin(t, "CREATE ROLE "+place.Schema("x"))
		}
		_, err := place.Open(t.Context(), "x", sqldb.Full)
		if !errors.Is(err, sqldb.ErrRole) || !strings.Contains(rpcerr.Fix(err), "pg_dumpall --roles-only") {
			t.Errorf("with the role (%t): %v", made, err)
		}
	}
}

func TestPostgresErrors(t *testing.T) {
	t.Parallel()
	place := sqldbtest.Place(t)
	away, odd, unknown := place, place, as(t, place, "nobody_"+place.Prefix)
	away.URL, odd.URL = "postgres://u:hunter2@127.0.0.1:1/x", "postgres://u:hunter2@[/x"
	for name, c := range map[string]struct {
		place sqldb.Postgres
		want  error
	}{"away": {away, sqldb.ErrUnavailable}, "unreadable": {odd, sqldb.ErrURL}, "unknown user": {unknown, sqldb.ErrDenied}} {
		if _, err := c.place.Open(t.Context(), "x", sqldb.Full); !errors.Is(err, c.want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
	}
	full := as(t, place, "full_"+place.Prefix)
	admin(t, "CREATE ROLE full_"+place.Prefix+" LOGIN CONNECTION LIMIT 0")
	if _, err := full.Open(t.Context(), "x", sqldb.Full); !errors.Is(err, sqldb.ErrUnavailable) || !strings.Contains(rpcerr.Fix(err), "pg_stat_activity") {
		t.Errorf("without a connection left: %v", err)
	}
	slow := place
	slow.StatementTimeout = 50e6
	if _, err := sqldbtest.Open(t, slow, "x").Exec(t.Context(), "SELECT pg_sleep(60)"); !errors.Is(err, sqldb.ErrTimeout) {
		t.Errorf("a slow statement: %v", err)
	}
}

// A transaction whose connection breaks before its commit is run again; one that the server chose
// to fail, too.
func TestPostgresRunsAgainWhatDidNotHappen(t *testing.T) {
	t.Parallel()
	db := migrate(t, sqldbtest.Open(t, sqldbtest.Place(t), "x"))
	for name, hurt := range map[string]string{
		"broken":        "",
		"serialization": "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END $$",
		"deadlock":      "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END $$",
	} {
		tries := 0
		err := db.Tx(t.Context(), func(tx *sql.Tx) error {
			tries++
			if _, err := tx.ExecContext(t.Context(), "UPDATE parent SET id = id + 1"); err != nil {
				return err
			}
			if tries > 1 {
				return nil
			}
			if hurt == "" {
				var pid int
				if err := tx.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
					return err
				}
				admin(t, fmt.Sprintf("SELECT pg_terminate_backend(%d, 5000)", pid))
			}
			_, err := tx.ExecContext(t.Context(), hurt)
			return err
		})
		if err != nil || tries != 2 {
			t.Errorf("%s: %d tries, %v", name, tries, err)
		}
	}
	var n int
	if err := db.One(t.Context(), "SELECT id FROM parent", nil, &n); err != nil || n != 4 {
		t.Errorf("counted to %d, want 4: %v", n, err)
	}
	tries := 0
	err := db.Tx(t.Context(), func(tx *sql.Tx) error {
		tries++
		_, err := tx.ExecContext(t.Context(), "INSERT INTO parent (id) VALUES (4)")
		return err
	})
	if err == nil || tries != 1 {
		t.Errorf("a duplicate key was tried %d times: %v", tries, err)
	}
}

// A commit whose answer was lost is not repeated; the server is asked for its result.
func TestPostgresLostCommit(t *testing.T) {
	t.Parallel()
	for _, arrives := range []bool{true, false} {
		t.Run(fmt.Sprintf("arrives=%v", arrives), func(t *testing.T) {
			t.Parallel()
			place := sqldbtest.Place(t)
			wire := newWire(t, place.URL)
			place.URL = wire.url
			db := migrate(t, sqldbtest.Open(t, place, "x"))
			tries := 0
			err := db.Tx(t.Context(), func(tx *sql.Tx) error {
				tries++
				_, err := tx.ExecContext(t.Context(), "UPDATE parent SET id = id + 1")
				if tries == 1 { // the next message of this connection is the commit
					wire.cut(arrives)
				}
				return err
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

// wire is a proxy before the server. After cut it drops the first connection that sends something:
// before it passed that on, or before the answer comes back.
type wire struct {
	url    string
	target atomic.Value // address of the server
	armed  atomic.Int32 // 1: pass it on, 2: do not
	dead   func()       // called before the connection is dropped
}

// fail is cut where another server replaces the first one: ready prepares it.
func (w *wire) fail(arrives bool, ready func() error, next string) {
	w.dead = func() {
		if err := ready(); err != nil {
			panic(err)
		}
		w.lead(next)
	}
	w.cut(arrives)
}

// lead passes new connections on to another server.
func (w *wire) lead(server string) {
	u, _ := url.Parse(server)
	w.target.Store(u.Host)
}

func (w *wire) cut(arrives bool) {
	if arrives {
		w.armed.Store(1)
		return
	}
	w.armed.Store(2)
}

func newWire(t *testing.T, server string) *wire {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{dead: func() {}}
	w.target.Store(u.Host)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lis.Close() })
	u.Host = lis.Addr().String()
	w.url = u.String()
	go func() {
		for {
			client, err := lis.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", w.target.Load().(string))
			if err != nil {
				client.Close()
				continue
			}
			go w.carry(client, server)
		}
	}()
	return w
}

func (w *wire) carry(client, server net.Conn) {
	var dropping atomic.Bool
	go func() {
		defer client.Close()
		buf := make([]byte, 1<<16)
		for {
			n, err := server.Read(buf)
			if dropping.Load() {
				w.dead()
				return
			}
			if err != nil {
				return
			}
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
	}()
	defer server.Close()
	buf := make([]byte, 1<<16)
	for {
		n, err := client.Read(buf)
		if err != nil {
			return
		}
		switch w.armed.Swap(0) {
		case 1:
			dropping.Store(true)
		case 2:
			w.dead()
			client.Close()
			return
		}
		if _, err := server.Write(buf[:n]); err != nil {
			return
		}
		if dropping.Load() {
			_, _ = io.Copy(io.Discard, client) // until the reader of answers has closed it
			return
		}
	}
}

// A server that crashes and comes back costs a transaction a second try.
func TestPostgresRestart(t *testing.T) {
	t.Parallel()
	sqldbtest.Require(t)
	server, err := sqldbtest.Start()
	if err != nil {
		t.Fatal(err)
	}
	db := migrate(t, sqldbtest.Open(t, sqldb.Postgres{URL: server.URL, Prefix: "t"}, "x"))
	tries := 0
	err = db.Tx(t.Context(), func(tx *sql.Tx) error {
		if tries++; tries == 1 {
			server.Kill()
			if err := server.Run(); err != nil {
				return err
			}
		}
		return insert(t.Context(), 2)(tx)
	})
	if err != nil || tries != 2 || count(t, db, "parent") != 2 {
		t.Errorf("%d tries: %v", tries, err)
	}
	server.Kill()
	if err := server.Run(); err != nil {
		t.Fatal(err)
	}
	if n := count(t, db, "parent"); n != 2 {
		t.Errorf("after a restart: %d rows", n)
	}
}
