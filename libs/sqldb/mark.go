package sqldb

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
)

// A mark says whether a transaction was committed, if the connection broke before the answer: each
// write transaction on PostgreSQL first writes its number into the row of a client, and no two
// transactions use a client at the same time.
//
// PostgreSQL's own numbers (pg_xact_status) do not tell: a promoted standby gives the numbers that
// it has not received from its primary to other transactions.
type mark struct {
	client string
	number int64
}

// markDays is how long the row of a client that is not used any more is kept.
const markDays = 1

// prepareMarks makes the table of marks in a schema, for its role.
func prepareMarks(ctx context.Context, conn *pgx.Conn, schema string) error {
	for _, statement := range []string{
		"SET ROLE " + schema,
		`CREATE TABLE IF NOT EXISTS ` + schema + `.commit_mark (
			client TEXT PRIMARY KEY,
			number BIGINT NOT NULL,
			at     TIMESTAMPTZ NOT NULL DEFAULT now()
		)`,
		fmt.Sprintf("DELETE FROM %s.commit_mark WHERE at < now() - interval '%d day'", schema, markDays),
	} {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return domain(err)
		}
	}
	return nil
}

// set is the first statement of a transaction. It waits for an earlier transaction of the client
// that the server has not ended yet.
func (m *mark) set(ctx context.Context, tx *sql.Tx) error {
	m.number++
	_, err := tx.ExecContext(ctx, `INSERT INTO commit_mark (client, number) VALUES ($1, $2)
		ON CONFLICT (client) DO UPDATE SET number = excluded.number, at = now()`, m.client, m.number)
	return err
}

// committed reports whether the last transaction was committed. It waits until the server has ended
// it, or until another server has taken over. ErrUnknown.
func (m *mark) committed(ctx context.Context, pool *sql.DB) (bool, error) {
	wait := backoff{limit: resolveWithin}
	for {
		var number int64
		err := pool.QueryRowContext(ctx, `INSERT INTO commit_mark (client, number) VALUES ($1, 0)
			ON CONFLICT (client) DO UPDATE SET at = now() RETURNING number`, m.client).Scan(&number)
		if err == nil {
			return number == m.number, nil
		}
		if !transient(err) || !wait.next(ctx) {
			return false, ErrUnknown.Wrap(err)
		}
	}
}

// marks are the clients of a process that no transaction uses.
type marks struct {
	mu   sync.Mutex
	free []*mark
}

func (m *marks) take() *mark {
	m.mu.Lock()
	defer m.mu.Unlock()
	last := len(m.free) - 1
	if last < 0 {
		return &mark{client: rand.Text()}
	}
	taken := m.free[last]
	m.free = m.free[:last]
	return taken
}

func (m *marks) put(used *mark) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.free = append(m.free, used)
}
