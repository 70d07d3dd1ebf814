// Package lease lets one of several processes act, and refuses the others at the database.
//
// A lease is a row in a service's own database: who holds it, and an epoch that grows with each
// holder. The holder renews it; a candidate takes it if it was not renewed for a TTL. Clocks of
// different machines are never compared: a candidate watches the row for a TTL of its own clock,
// and the holder gives up when its own last renewal began a TTL ago.
//
// That alone is not safe: a process may be suspended after the check (SIGSTOP, a long pause) and
// continue when another leads. So each write transaction of a term reads the epoch first (Fence),
// and holds it: a transaction either ends before the lease can be taken, or finds another epoch and
// is refused with ErrFenced.
//
//	waiting --row is free, or unchanged for a TTL--> leading --renewal refused or late--> stepping down --work ended--> waiting
//	leading --context ends--> work ends, then the row is set free: the next one need not wait
package lease

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
)

// TTL is how long a lease is valid without a renewal.
const TTL = 2 * time.Second

// Cause is the key in the metadata of ErrNotLeader of the reason why no replica can lead, such as
// "DATABASE_UNAVAILABLE".
const Cause = "cause"

// Errors of this package, compared with errors.Is.
var (
	// ErrNotLeader is returned by a replica that is not the leader. Its metadata has the leader's
	// address if it is known, and Cause where the lease can't be read or renewed.
	ErrNotLeader = rpcerr.New(codes.Unavailable, "NOT_LEADER", "another replica leads this service").RetryAfter(200 * time.Millisecond)
	// ErrFenced refuses a write of a leader whose term is over. It must not be repeated.
	ErrFenced = rpcerr.New(codes.Aborted, "FENCED", "another replica has taken the lease: this process no longer leads and its write was refused")
	errTaken  = errors.New("another replica was first")
)

// Lease is a row.
type Lease struct {
	Epoch   uint64
	Beat    uint64
	Holder  string // "" without a holder
	Address string // host:port of the holder
}

// Table is the lease of one name in a service's database, whose migrations make the table.
type Table struct {
	db   *sqldb.DB // without a fence
	name string
}

// NewTable names a lease.
func NewTable(db *sqldb.DB, name string) *Table { return &Table{db: db, name: name} }

// Read returns the row; if there never was a leader, a free one of epoch 0.
func (t *Table) Read(ctx context.Context) (Lease, error) {
	var l Lease
	err := t.db.One(ctx, `SELECT epoch, beat, holder, address FROM lease WHERE name = $1`, []any{t.name}, &l.Epoch, &l.Beat, &l.Holder, &l.Address)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return Lease{}, fmt.Errorf("read the lease of %s: %w", t.name, err)
	}
	return l, nil
}

// Take makes holder the leader of the next epoch, unless the row has changed since it was read.
func (t *Table) Take(ctx context.Context, seen Lease, holder, address string) (Lease, error) {
	next := Lease{Epoch: seen.Epoch + 1, Beat: 1, Holder: holder, Address: address}
	err := t.db.Tx(ctx, func(tx *sql.Tx) error {
		if t.db.Postgres() { // a failover must not give an epoch to a second holder
			if _, err := tx.ExecContext(ctx, `SET LOCAL synchronous_commit = on`); err != nil {
				return err
			}
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO lease (name, epoch, beat, holder, address) VALUES ($1, 0, 0, '', '') ON CONFLICT (name) DO NOTHING`, t.name); err != nil {
			return err
		}
		return t.change(ctx, tx, `UPDATE lease SET epoch = $1, beat = 1, holder = $2, address = $3 WHERE name = $4 AND epoch = $5 AND beat = $6`,
			next.Epoch, holder, address, t.name, seen.Epoch, seen.Beat)
	})
	if err != nil {
		return Lease{}, fmt.Errorf("take the lease of %s: %w", t.name, err)
	}
	return next, nil
}

// Begin makes holder the leader of the next epoch. Only for a database that no other process can
// use: the one before has ended.
func (t *Table) Begin(ctx context.Context, holder, address string) (Lease, error) {
	before, err := t.Read(ctx)
	if err != nil {
		return Lease{}, err
	}
	return t.Take(ctx, before, holder, address)
}

// Renew extends the lease of its holder.
func (t *Table) Renew(ctx context.Context, mine Lease) (Lease, error) {
	err := t.db.Tx(ctx, func(tx *sql.Tx) error {
		return t.change(ctx, tx, `UPDATE lease SET beat = beat + 1 WHERE name = $1 AND epoch = $2 AND holder <> ''`, t.name, mine.Epoch)
	})
	if err != nil {
		return Lease{}, fmt.Errorf("renew the lease of %s: %w", t.name, err)
	}
	mine.Beat++
	return mine, nil
}

// Release frees the lease. It does nothing if another process has it.
func (t *Table) Release(ctx context.Context, mine Lease) error {
	_, err := t.db.Exec(ctx, `UPDATE lease SET holder = '', address = '', beat = beat + 1 WHERE name = $1 AND epoch = $2`, t.name, mine.Epoch)
	if err != nil {
		return fmt.Errorf("release the lease of %s: %w", t.name, err)
	}
	return nil
}

func (t *Table) change(ctx context.Context, tx *sql.Tx, statement string, args ...any) error {
	res, err := tx.ExecContext(ctx, statement, args...)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n != 1 {
		return errors.Join(err, errTaken)
	}
	return nil
}

// Fence allows write transactions only while the lease has this epoch. No process can take the
// lease before such a transaction has ended.
func (t *Table) Fence(epoch uint64) sqldb.Fence {
	query := `SELECT epoch FROM lease WHERE name = $1`
	if t.db.Postgres() {
		query += ` FOR KEY SHARE`
	}
	return func(ctx context.Context, tx *sql.Tx) error {
		var now uint64
		err := tx.QueryRowContext(ctx, query, t.name).Scan(&now)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return fmt.Errorf("check the lease of %s: %w", t.name, err)
		}
		if now != epoch || epoch == 0 {
			return ErrFenced.With("service", t.name).With("epoch", strconv.FormatUint(epoch, 10)).With("leader_epoch", strconv.FormatUint(now, 10))
		}
		return nil
	}
}
