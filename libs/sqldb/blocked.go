package sqldb

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
)

const (
	// slowCall is after how long a call counts as one that may wait for a lock.
	slowCall = 2 * time.Second
	// askTimeout is how long the server has to list the locks that calls wait for.
	askTimeout = 2 * time.Second
)

// Blocked is a service that waits for a lock in PostgreSQL, and the session that holds it.
type Blocked struct {
	Service string        // whose connection waits: "buffer"
	For     time.Duration // how long its statement has run
	Table   string        // with its schema; "" if the lock is not of a table
	PID     int           // of the backend that holds the lock, and waits for no other one
	Session string        // that backend, for people
}

// Sentence says who holds the lock.
func (b Blocked) Sentence() string {
	what := "a lock"
	if b.Table != "" {
		what = "a lock on the table " + b.Table
	}
	return fmt.Sprintf("%s of PostgreSQL, which the session with pid %d holds (%s)", what, b.PID, b.Session)
}

// Fix is what ends the wait.
func (b Blocked) Fix() string {
	return fmt.Sprintf("end that session, or its transaction: `SELECT pg_terminate_backend(%d)` in psql; active runs then continue", b.PID)
}

// blockedStatement lists which connections of services wait for locks, and who holds these: of a
// chain of waiting sessions the one that waits for none.
const blockedStatement = `
WITH RECURSIVE waiting(first, pid, depth) AS (
	SELECT w.pid, blocker, 1 FROM pg_stat_activity w CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS blocker
	WHERE w.datname = current_database() AND w.wait_event_type = 'Lock' AND starts_with(w.application_name, 'rollout ')
		AND starts_with(split_part(w.application_name, ' ', 3), $1)
	UNION
	SELECT waiting.first, blocker, depth + 1 FROM waiting CROSS JOIN LATERAL unnest(pg_blocking_pids(waiting.pid)) AS blocker WHERE depth < 8
)
SELECT DISTINCT ON (w.pid) w.pid, w.application_name, extract(epoch FROM clock_timestamp() - w.query_start)::float8,
	coalesce((
		SELECT l.relation::regclass::text FROM pg_locks l JOIN pg_class c ON c.oid = l.relation AND c.relkind IN ('r', 'p')
		WHERE l.pid = w.pid AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
			AND (NOT l.granted OR l.locktype = 'tuple' OR l.mode IN ('RowShareLock', 'RowExclusiveLock'))
		ORDER BY l.granted, l.locktype = 'tuple' DESC LIMIT 1), ''),
	b.pid, coalesce(b.application_name, ''), coalesce(b.usename::text, ''), coalesce(host(b.client_addr), ''), coalesce(b.state, ''),
	coalesce(extract(epoch FROM clock_timestamp() - coalesce(b.xact_start, b.backend_start))::float8, 0), coalesce(left(b.query, 200), '')
FROM waiting JOIN pg_stat_activity w ON w.pid = waiting.first JOIN pg_stat_activity b ON b.pid = waiting.pid
WHERE cardinality(pg_blocking_pids(b.pid)) = 0
ORDER BY w.pid, b.xact_start`

// Blocked lists the services of this deployment that wait for a lock, the longest wait first, once
// for each session that holds one. Of SQLite the list is empty.
func (db *DB) Blocked(ctx context.Context) ([]Blocked, error) {
	if !db.Postgres() {
		return nil, nil
	}
	found, err := db.postgres.blocked(ctx)
	type wait struct {
		service string
		holder  int
	}
	longest := map[wait]Blocked{}
	for _, b := range found {
		if w := (wait{b.Service, b.PID}); b.For > longest[w].For {
			longest[w] = b
		}
	}
	return slices.SortedFunc(maps.Values(longest), func(a, b Blocked) int { return cmp.Compare(b.For, a.For) }), err
}

// locks are what the server answered last, which the calls of a service share.
type locks struct {
	mu    sync.Mutex
	asked time.Time
	found map[uint32]Blocked
	err   error
}

// blocked lists the calls that wait for locks, by the pid of the backend that waits. It asks on a
// separate connection, one at a time.
func (s *server) blocked(ctx context.Context) (map[uint32]Blocked, error) {
	s.locks.mu.Lock()
	defer s.locks.mu.Unlock()
	if time.Since(s.locks.asked) > s.slow()/2 {
		s.locks.found, s.locks.err = s.ask(ctx)
		s.locks.asked = time.Now()
		if ctx.Err() != nil { // of this call, not of the server
			s.locks.asked = time.Time{}
		}
	}
	return s.locks.found, s.locks.err
}

func (s *server) ask(ctx context.Context) (map[uint32]Blocked, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, &s.login)
	if err != nil {
		return nil, domain(err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	rows, err := conn.Query(ctx, blockedStatement, s.prefix)
	if err != nil {
		return nil, domain(err)
	}
	out := map[uint32]Blocked{}
	var waits, by uint32
	var table, service, application, user, host, state, query string
	var seconds, age float64
	_, err = pgx.ForEachRow(rows, []any{&waits, &service, &seconds, &table, &by, &application, &user, &host, &state, &age, &query}, func() error {
		out[waits] = Blocked{
			Service: strings.Fields(service)[1], For: time.Duration(seconds * float64(time.Second)), Table: table, PID: int(by),
			Session: session(application, user, host, state, age, query),
		}
		return nil
	})
	return out, domain(err)
}

// session describes a backend to people.
func session(application, user, host, state string, age float64, query string) string {
	var parts []string
	if application != "" {
		parts = append(parts, "application "+application)
	}
	if user != "" {
		parts = append(parts, "user "+user)
	}
	if host != "" {
		parts = append(parts, "from "+host)
	}
	if state != "" {
		parts = append(parts, fmt.Sprintf("%s, its transaction is %.0f s old", state, age))
	}
	if query = strings.Join(strings.Fields(query), " "); query != "" {
		parts = append(parts, "last statement: "+query)
	}
	return strings.Join(parts, ", ")
}

// watched is a call whose lock is looked up if it takes long.
type watched struct {
	stop func()
	lock *atomic.Pointer[Blocked] // nil in it: it waits for none, or that is not known
}

// watch finds out which lock a call waits for that takes long, until it is stopped.
func (s *server) watch(ctx context.Context, conn *sql.Conn) watched {
	w := watched{lock: &atomic.Pointer[Blocked]{}}
	watching, cancel := context.WithCancel(context.WithoutCancel(ctx))
	w.stop = cancel
	_ = conn.Raw(func(c any) error {
		backend := c.(*stdlib.Conn).Conn().PgConn().PID()
		timer := time.AfterFunc(s.slow(), func() { s.follow(watching, backend, w.lock) })
		w.stop = func() { timer.Stop(); cancel() }
		return nil
	})
	return w
}

// slow is slowCall, or less of a server whose statements end before.
func (s *server) slow() time.Duration {
	if s.statement > 0 {
		return min(slowCall, s.statement/2)
	}
	return slowCall
}

// follow asks again and again which lock a backend waits for, until ctx ends.
func (s *server) follow(ctx context.Context, backend uint32, lock *atomic.Pointer[Blocked]) {
	tick := time.NewTicker(s.slow())
	defer tick.Stop()
	for {
		found, err := s.blocked(ctx)
		if ctx.Err() != nil {
			return
		}
		lock.Store(nil)
		if b, waits := found[backend]; waits && err == nil {
			lock.Store(&b)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// explain adds the lock to the error of a call that gave up waiting for it.
func (w watched) explain(err error) error {
	b := w.lock.Load()
	if b == nil || err == nil || state(err) != queryCanceled && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return ErrTimeout.WithMessage("the database gave up on a statement that waited for %s", b.Sentence()).Fix(b.Fix()).Wrap(err)
}
