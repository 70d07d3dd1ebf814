package lease_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

// ttl is one that a busy machine renews in time.
const ttl = 3 * time.Second

// open is a database with the lease table, as services have it, and another table.
func open(t *testing.T, place sqldb.Place) *sqldb.DB {
	t.Helper()
	db := sqldbtest.Open(t, place, "x")
	migrations := fstest.MapFS{}
	for _, dialect := range []string{"sqlite", "postgres"} {
		text, err := os.ReadFile("../../database/buffer/" + dialect + "/00002_lease.sql")
		if err != nil {
			t.Fatal(err)
		}
		migrations[dialect+"/00001_lease.sql"] = &fstest.MapFile{Data: text}
		migrations[dialect+"/00002_note.sql"] = &fstest.MapFile{Data: []byte("-- +goose Up\nCREATE TABLE note (epoch BIGINT NOT NULL);\n")}
	}
	if err := db.Migrate(t.Context(), migrations); err != nil {
		t.Fatal(err)
	}
	return db
}

func note(ctx context.Context, epoch uint64) func(tx *sql.Tx) error {
	return func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO note (epoch) VALUES ($1)", epoch)
		return err
	}
}

func notes(t *testing.T, db *sqldb.DB) (n int) {
	t.Helper()
	if err := db.One(t.Context(), "SELECT count(*) FROM note", nil, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestSuite(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		for name, test := range map[string]func(*testing.T, sqldb.Place){
			"Row": row, "Fence": fence, "TakeWaitsForTransactions": takeWaits, "RenewDoesNot": renewDoesNot,
			"OneLeads": oneLeads, "DeadLeader": deadLeader, "FrozenLeader": frozenLeader,
		} {
			t.Run(name, func(t *testing.T) { t.Parallel(); test(t, place(t)) })
		}
	})
}

func take(t *testing.T, table *lease.Table, holder string) lease.Lease {
	t.Helper()
	seen, err := table.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	mine, err := table.Take(t.Context(), seen, holder, holder+":1")
	if err != nil {
		t.Fatal(err)
	}
	return mine
}

func row(t *testing.T, place sqldb.Place) {
	db := open(t, place)
	table, other := lease.NewTable(db, "x"), lease.NewTable(db, "y")
	if l, err := table.Read(t.Context()); err != nil || l != (lease.Lease{}) {
		t.Fatalf("at first: %+v %v", l, err)
	}
	first := take(t, table, "a")
	if l, err := table.Read(t.Context()); err != nil || l != first || l.Epoch != 1 || l.Address != "a:1" {
		t.Fatalf("taken: %+v %v", l, err)
	}
	if _, err := table.Take(t.Context(), lease.Lease{}, "b", ""); err == nil {
		t.Error("taken by who saw an older row")
	}
	renewed, err := table.Renew(t.Context(), first)
	if err != nil || renewed.Beat != first.Beat+1 {
		t.Fatalf("renewed: %+v %v", renewed, err)
	}
	if _, err := table.Take(t.Context(), first, "b", ""); err == nil {
		t.Error("taken by a candidate that had not read the renewal")
	}
	second := take(t, table, "b")
	if _, err := table.Renew(t.Context(), renewed); err == nil || second.Epoch != 2 {
		t.Errorf("the old holder renewed: %v, %+v", err, second)
	}
	if err := table.Release(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	if l, _ := table.Read(t.Context()); l.Holder != "b" {
		t.Errorf("the old holder set it free: %+v", l)
	}
	if err := table.Release(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	if l, _ := table.Read(t.Context()); l.Holder != "" || l.Epoch != 2 {
		t.Errorf("set free: %+v", l)
	}
	if _, err := table.Renew(t.Context(), second); err == nil {
		t.Error("renewed a released lease")
	}
	if l, err := other.Read(t.Context()); err != nil || l != (lease.Lease{}) {
		t.Errorf("another name: %+v %v", l, err)
	}
}

func fence(t *testing.T, place sqldb.Place) {
	db := open(t, place)
	table := lease.NewTable(db, "x")
	first := take(t, table, "a")
	old := db.Fenced(table.Fence(first.Epoch))
	if err := old.Tx(t.Context(), note(t.Context(), 1)); err != nil {
		t.Fatal(err)
	}
	second := take(t, table, "b")
	for name, write := range map[string]func() error{
		"transaction": func() error { return old.Tx(t.Context(), note(t.Context(), 1)) },
		"statement":   func() error { _, err := old.Exec(t.Context(), "DELETE FROM note"); return err },
		"epoch 0":     func() error { return db.Fenced(table.Fence(0)).Tx(t.Context(), note(t.Context(), 0)) },
	} {
		if err := write(); !errors.Is(err, lease.ErrFenced) {
			t.Errorf("%s of an old leader: %v", name, err)
		}
	}
	if err := db.Fenced(table.Fence(second.Epoch)).Tx(t.Context(), note(t.Context(), 2)); err != nil {
		t.Errorf("the leader: %v", err)
	}
	if n := notes(t, db); n != 2 {
		t.Errorf("%d rows, want 2", n)
	}
}

// When another holder has the lease, every transaction of the previous holder has ended, and its
// writes are visible.
func takeWaits(t *testing.T, place sqldb.Place) {
	db := open(t, place)
	table := lease.NewTable(db, "x")
	first := take(t, table, "a")
	other := lease.NewTable(open(t, place), "x")
	taken := make(chan error, 1)
	err := db.Fenced(table.Fence(first.Epoch)).Tx(t.Context(), func(tx *sql.Tx) error {
		go func() {
			_, err := other.Take(t.Context(), first, "b", "")
			taken <- err
		}()
		select {
		case err := <-taken:
			t.Errorf("taken under a transaction of its holder: %v", err)
			taken <- err
		case <-time.After(100 * time.Millisecond): // long enough for a take that does not wait
		}
		return note(t.Context(), first.Epoch)(tx)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-taken; err != nil {
		t.Fatal(err)
	}
	if n := notes(t, db); n != 1 {
		t.Errorf("%d rows, want 1", n)
	}
}

func renewDoesNot(t *testing.T, place sqldb.Place) {
	db := open(t, place)
	if !db.Postgres() {
		t.Skip("SQLite: all writes take turns")
	}
	table := lease.NewTable(db, "x")
	mine := take(t, table, "a")
	err := db.Fenced(table.Fence(mine.Epoch)).Tx(t.Context(), func(tx *sql.Tx) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := table.Renew(ctx, mine); err != nil {
			return err
		}
		return note(t.Context(), mine.Epoch)(tx)
	})
	if err != nil {
		t.Errorf("a renewal waits for a transaction of the holder: %v", err)
	}
}

// replica runs a candidate; led gets each of its terms and ended when one is over.
type replica struct {
	led, ended chan uint64
	stop       context.CancelFunc
	done       chan struct{}
}

func run(t *testing.T, place sqldb.Place, name string) *replica {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r := &replica{led: make(chan uint64, 9), ended: make(chan uint64, 9), stop: cancel, done: make(chan struct{})}
	c := &lease.Candidate{Table: lease.NewTable(open(t, place), "x"), Holder: name, Address: name + ":1", TTL: ttl}
	go func() {
		defer close(r.done)
		err := c.Run(ctx, func(ctx context.Context, term *lease.Term) error {
			if !term.Valid() {
				t.Error("a term that begins is not valid")
			}
			r.led <- term.Epoch
			<-ctx.Done()
			r.ended <- term.Epoch
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() { cancel(); <-r.done })
	return r
}

func oneLeads(t *testing.T, place sqldb.Place) {
	a := run(t, place, "a")
	if epoch := <-a.led; epoch != 1 {
		t.Fatalf("the first leads epoch %d", epoch)
	}
	b := run(t, place, "b")
	select {
	case <-b.led:
		t.Fatal("both lead")
	case <-a.ended:
		t.Fatal("the first lost the lease that it renewed")
	case <-time.After(3 * ttl):
	}
	a.stop()
	if epoch := <-b.led; epoch != 2 {
		t.Errorf("the second leads epoch %d", epoch)
	}
}

func deadLeader(t *testing.T, place sqldb.Place) {
	table := lease.NewTable(open(t, place), "x")
	dead := take(t, table, "dead") // and never renewed
	if epoch := <-run(t, place, "b").led; epoch != dead.Epoch+1 {
		t.Errorf("epoch %d", epoch)
	}
}

// A leader whose lease was taken while it stood still stops, is refused, and waits for its turn.
func frozenLeader(t *testing.T, place sqldb.Place) {
	db := open(t, place)
	a := run(t, place, "a")
	first := <-a.led
	table := lease.NewTable(db, "x")
	for { // until no renewal comes between
		seen, err := table.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := table.Take(t.Context(), seen, "b", ""); err == nil {
			break
		}
	}
	if err := db.Fenced(table.Fence(first)).Tx(t.Context(), note(t.Context(), first)); !errors.Is(err, lease.ErrFenced) {
		t.Errorf("write of the old term: %v", err)
	}
	<-a.ended
	if again := <-a.led; again != first+2 { // b never renews
		t.Errorf("leads epoch %d again, want %d", again, first+2)
	}
}
