// Package fence lets the owner of data refuse changes that a former leader decided.
//
// A leader may be suspended between a decision and its effect, and continue when another one leads.
// Its own database refuses its writes (libs/lease); other services recognize it by the Fence of its
// requests. The database of each owner has two tables:
//
//	fence_leader  role -> highest leader_epoch that has changed anything here
//	fence_run     run  -> highest incarnation that has changed data of the run
//
// Admit compares a Fence with both in the transaction of the change. The row of a role outlives the
// runs, so a former leader can't recreate the data of a deleted run.
//
// What a worker or a leader that still leads has sent may also arrive after the deletion. A third
// table, fence_deleted, refuses it for a month. It names the digest of the run, so that nothing of
// the run is left.
package fence

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
)

// ErrFenced refuses a change that a former leader decided. Nothing is changed, and the call must
// not be repeated.
var ErrFenced = rpcerr.New(codes.FailedPrecondition, "FENCED", "a newer leader or incarnation has changed this data since")

// ErrDeleted refuses a change of a run that was deleted. Nothing is changed, and the call must not
// be repeated.
var ErrDeleted = rpcerr.New(codes.FailedPrecondition, "RUN_DELETED", "the run was deleted")

// Refused reports whether err is ErrFenced or ErrDeleted, made here or received.
func Refused(err error) bool {
	e, ok := rpcerr.From(err)
	return ok && (e.Is(ErrFenced) || e.Is(ErrDeleted))
}

// table is one of the two tables.
type table struct{ read, raise string }

var (
	leaders = table{
		read: `SELECT epoch FROM fence_leader WHERE role = $1`,
		raise: `INSERT INTO fence_leader (role, epoch) VALUES ($1, $2)
			ON CONFLICT (role) DO UPDATE SET epoch = excluded.epoch WHERE fence_leader.epoch < excluded.epoch`,
	}
	runs = table{
		read: `SELECT incarnation FROM fence_run WHERE run = $1`,
		raise: `INSERT INTO fence_run (run, incarnation) VALUES ($1, $2)
			ON CONFLICT (run) DO UPDATE SET incarnation = excluded.incarnation WHERE fence_run.incarnation < excluded.incarnation`,
	}
)

// Admit remembers who decided a change of a run's data, for the rest of the transaction and after
// its commit. run is "" if the data belongs to no run. ErrFenced if someone newer has changed data
// before; ErrDeleted. by is nil for programs without a scheduler; they are refused if a leader has
// changed data of the run.
func Admit(ctx context.Context, tx *sql.Tx, d sqldb.Dialect, run string, by *fencev1.Fence) error {
	if err := Live(ctx, tx, d, run); err != nil {
		return err
	}
	return each(run, by, func(t table, key string, value uint64) (uint64, error) { return t.admit(ctx, tx, d, key, value) })
}

// AdmitRemoval is Admit for a change that only deletes data, which a deleted run allows. It
// remembers the leader alone, so that no row of the run is left.
func AdmitRemoval(ctx context.Context, tx *sql.Tx, d sqldb.Dialect, run string, by *fencev1.Fence) error {
	return each(run, by, func(t table, key string, value uint64) (uint64, error) {
		if t == runs {
			return t.newest(ctx, tx, key, "")
		}
		return t.admit(ctx, tx, d, key, value)
	})
}

// admit raises the value of a key to at least the given one, and returns it.
func (t table) admit(ctx context.Context, tx *sql.Tx, d sqldb.Dialect, key string, value uint64) (uint64, error) {
	known, err := t.newest(ctx, tx, key, "")
	if err == nil && known < value {
		if _, err = tx.ExecContext(ctx, t.raise, key, value); err != nil {
			err = fmt.Errorf("remember the leader of %s: %w", key, err)
		}
	}
	if err != nil || !d.Postgres() { // SQLite runs one write transaction at a time
		return known, err
	}
	return t.newest(ctx, tx, key, " FOR SHARE") // no one raises it before this transaction ends
}

// Check is Admit for a transaction that only reads.
func Check(ctx context.Context, tx *sql.Tx, run string, by *fencev1.Fence) error {
	return each(run, by, func(t table, key string, _ uint64) (uint64, error) { return t.newest(ctx, tx, key, "") })
}

// Live returns ErrDeleted if a run is deleted. Otherwise it is not deleted before the transaction
// ends.
func Live(ctx context.Context, tx *sql.Tx, d sqldb.Dialect, run string) error {
	if run == "" {
		return nil
	}
	if err := lock(ctx, tx, d, "pg_advisory_xact_lock_shared", run); err != nil {
		return err
	}
	var found int
	err := tx.QueryRowContext(ctx, `SELECT 1 FROM fence_deleted WHERE digest = $1`, digest(run)).Scan(&found)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("find out whether %s is deleted: %w", run, err)
	}
	return ErrDeleted.With("run", run).WithMessage("run %s was deleted", run).Fix("start a new run")
}

// Delete is AdmitRemoval for the first transaction of the deletion of a run. From its commit on,
// Live refuses what would create data of the run.
func Delete(ctx context.Context, tx *sql.Tx, d sqldb.Dialect, run string, by *fencev1.Fence) error {
	if err := lock(ctx, tx, d, "pg_advisory_xact_lock", run); err != nil {
		return err
	}
	if err := AdmitRemoval(ctx, tx, d, run, by); err != nil {
		return err
	}
	return Bury(ctx, tx, d, run)
}

// deletedDays is how long what arrives for a deleted run is refused.
const deletedDays = 30

// Bury is Delete where the caller decides alone.
func Bury(ctx context.Context, tx *sql.Tx, d sqldb.Dialect, run string) error {
	if err := lock(ctx, tx, d, "pg_advisory_xact_lock", run); err != nil {
		return err
	}
	now := "unixepoch()"
	if d.Postgres() {
		now = "extract(epoch FROM now())::bigint"
	}
	for _, s := range []struct {
		statement string
		args      []any
	}{
		{`DELETE FROM fence_run WHERE run = $1`, []any{run}},
		{`DELETE FROM fence_deleted WHERE expires < ` + now, nil},
		{fmt.Sprintf(`INSERT INTO fence_deleted (digest, expires) VALUES ($1, %s + %d) ON CONFLICT DO NOTHING`, now, deletedDays*24*3600), []any{digest(run)}},
	} {
		if _, err := tx.ExecContext(ctx, s.statement, s.args...); err != nil {
			return fmt.Errorf("record that %s is deleted: %w", run, err)
		}
	}
	return nil
}

// digest names a run without its id.
func digest(run string) string {
	sum := sha256.Sum256([]byte(run))
	return hex.EncodeToString(sum[:16])
}

// lock takes a lock of a run until the transaction ends. SQLite runs one write transaction at a
// time.
func lock(ctx context.Context, tx *sql.Tx, d sqldb.Dialect, function, run string) error {
	if !d.Postgres() {
		return nil
	}
	if _, err := tx.ExecContext(ctx, "SELECT "+function+"(hashtextextended($1, 0))", "rollout/run/"+run); err != nil {
		return fmt.Errorf("lock the deletion of %s: %w", run, err)
	}
	return nil
}

// each compares a fence with the two tables. newest returns the highest known value of a key, and
// may raise it to the given one.
func each(run string, by *fencev1.Fence, newest func(t table, key string, value uint64) (uint64, error)) error {
	if by != nil {
		known, err := newest(leaders, by.GetRole(), by.GetLeaderEpoch())
		if err != nil {
			return err
		}
		if known > by.GetLeaderEpoch() {
			return refuse(run, by, "leader_epoch", by.GetLeaderEpoch(), known).
				WithMessage("the %s of epoch %d no longer leads: the one of epoch %d has changed data since", by.GetRole(), by.GetLeaderEpoch(), known)
		}
	}
	if run == "" {
		return nil
	}
	incarnation := uint64(by.GetIncarnation())
	known, err := newest(runs, run, incarnation)
	if err != nil {
		return err
	}
	switch {
	case known <= incarnation:
		return nil
	case by == nil:
		return refuse(run, by, "incarnation", 0, known).
			WithMessage("a scheduler leads run %s, and the request names no leader", run).
			Fix("let `rollout runs` change the run; a program with its own trainer needs a run id of its own")
	}
	return refuse(run, by, "incarnation", incarnation, known).
		WithMessage("the %s acts for incarnation %d of run %s: incarnation %d has changed data since", by.GetRole(), incarnation, run, known)
}

func refuse(run string, by *fencev1.Fence, what string, value, newest uint64) *rpcerr.Error {
	return ErrFenced.With("run", run).With("role", by.GetRole()).With(what, strconv.FormatUint(value, 10)).
		With("newest", strconv.FormatUint(newest, 10))
}

// newest is the value of a key; 0 if it has none.
func (t table) newest(ctx context.Context, tx *sql.Tx, key, lock string) (uint64, error) {
	var known uint64
	err := tx.QueryRowContext(ctx, t.read+lock, key).Scan(&known)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return 0, fmt.Errorf("read the newest leader of %s: %w", key, err)
	}
	return known, nil
}
