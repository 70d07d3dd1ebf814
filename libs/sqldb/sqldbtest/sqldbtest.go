// Package sqldbtest runs a store's suite on every database that there is: SQLite files always,
// PostgreSQL in the `servers` suite (make check-servers), on a real server that the first test of a
// process starts.
//
// The server is the installed PostgreSQL's, on a free port of loopback, in its own folder, without
// fsync; it ends with the process that started it. Each test has its own schemas.
package sqldbtest

import (
	"context"
	"crypto/rand"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/sqldb"
)

// Switch is the variable that `make check-servers` sets: without it tests on PostgreSQL are
// skipped, with it they fail if there is no server.
const Switch = "ROLLOUT_TEST_SERVERS"

// Run calls suite once for each kind of database, with a function that gives a new, empty place.
func Run(t *testing.T, suite func(t *testing.T, place func(t *testing.T) sqldb.Place)) {
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		suite(t, func(t *testing.T) sqldb.Place { return sqldb.Files(t.TempDir()) })
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		Require(t)
		suite(t, func(t *testing.T) sqldb.Place { return Place(t) })
	})
}

// Require skips the test unless tests with servers are enabled.
func Require(t testing.TB) {
	t.Helper()
	if os.Getenv(Switch) == "" { //nolint:forbidigo // like a test
		t.Skipf("PostgreSQL: not run, because %s is not set; make check-servers does", Switch)
	}
}

// Place is an empty place of the process's server.
func Place(t testing.TB) sqldb.Postgres {
	t.Helper()
	Require(t)
	return sqldb.Postgres{URL: URL(t), Prefix: prefix(), MaxConnections: 4, StatementTimeout: 30 * time.Second}
}

// URL returns the URL of the process's server, and starts the server if necessary. Its user is a
// superuser.
func URL(t testing.TB) string {
	t.Helper()
	Require(t)
	s, err := shared()
	if err != nil {
		t.Fatalf("PostgreSQL: %v", err)
	}
	return s.URL
}

func prefix() string { return "t_" + strings.ToLower(rand.Text()[:12]) }

// Store opens a service's store and closes it after the test.
func Store[S io.Closer](t testing.TB, place sqldb.Place, open func(context.Context, sqldb.Place) (S, error)) S {
	t.Helper()
	s, err := open(context.Background(), place)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// Open opens a service's database and closes it after the test.
func Open(t testing.TB, place sqldb.Place, service string) *sqldb.DB {
	t.Helper()
	db, err := place.Open(context.Background(), service, sqldb.Full)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}
