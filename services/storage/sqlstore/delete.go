package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/sqldb"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
)

// deleteRows is the number of rows that one transaction deletes, so that other writers wait
// briefly.
const deleteRows = 5000

// DeleteRun implements storage.Store.
func (s *Store) DeleteRun(ctx context.Context, run string, by *fencev1.Fence) error {
	if err := s.db.Tx(ctx, func(tx *sql.Tx) error { return fence.Delete(ctx, tx, s.db.Dialect, run, by) }); err != nil {
		return fmt.Errorf("delete what belongs to %s: %w", run, err)
	}
	for _, statement := range []string{
		fmt.Sprintf(`DELETE FROM event WHERE sequence IN (SELECT sequence FROM event WHERE run_id = $1 ORDER BY sequence LIMIT %d)`, deleteRows),
		fmt.Sprintf(`DELETE FROM metric WHERE run_id = $1 AND (name, step) IN (SELECT name, step FROM metric WHERE run_id = $1 ORDER BY name, step LIMIT %d)`, deleteRows),
	} {
		if err := s.repeat(ctx, statement, run); err != nil {
			return fmt.Errorf("delete the events and metrics of %s: %w", run, err)
		}
	}
	if err := s.deleteTelemetry(ctx, run); err != nil {
		return fmt.Errorf("delete the telemetry of %s: %w", run, err)
	}
	return nil
}

// DeleteBefore implements storage.Store.
func (s *Store) DeleteBefore(ctx context.Context, before time.Time) error {
	statement := fmt.Sprintf(`DELETE FROM event WHERE sequence IN (SELECT sequence FROM event WHERE time_us < $1 ORDER BY time_us LIMIT %d)`, deleteRows)
	if err := s.repeat(ctx, statement, before.UnixMicro()); err != nil {
		return fmt.Errorf("delete old events: %w", err)
	}
	return nil
}

// repeat runs a statement until it changes no row.
func (s *Store) repeat(ctx context.Context, statement string, args ...any) error {
	for {
		n, err := s.db.Exec(ctx, statement, args...)
		if err != nil || n == 0 {
			return err
		}
	}
}

// Admit implements storage.Store.
func (s *Store) Admit(ctx context.Context, run string, by *fencev1.Fence) error {
	return s.db.Tx(ctx, func(tx *sql.Tx) error { return s.admit(ctx, tx, run, by) })
}

func (s *Store) admit(ctx context.Context, tx *sql.Tx, run string, by *fencev1.Fence) error {
	if by == nil {
		return fence.Live(ctx, tx, s.db.Dialect, run)
	}
	if led(run, by) != run { // else Admit asks it
		if err := fence.Live(ctx, tx, s.db.Dialect, run); err != nil {
			return err
		}
	}
	return fence.Admit(ctx, tx, s.db.Dialect, led(run, by), by)
}

// led is the run that a leader acts for. A fence of incarnation 0 belongs to no run.
func led(run string, by *fencev1.Fence) string {
	if by != nil && by.GetIncarnation() == 0 {
		return ""
	}
	return run
}

// Own implements storage.Owners.
func (s *Store) Own(ctx context.Context, run, digest string, by *fencev1.Fence, remove func() error) error {
	var refused error
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		if refused = s.admit(ctx, tx, run, by); fence.Refused(refused) {
			own, others, err := owners(ctx, tx, run, digest)
			if err != nil || own+others > 0 || remove == nil {
				return err
			}
			return remove()
		}
		if refused != nil {
			return refused
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO artifact_owner (digest, run_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`, digest, run)
		return err
	})
	if err = errors.Join(refused, err); err != nil {
		return fmt.Errorf("record that artifact %s belongs to %s: %w", digest, run, err)
	}
	return nil
}

// owners counts for which runs an artifact was stored: a run, and others.
func owners(ctx context.Context, tx *sql.Tx, run, digest string) (own, others int, err error) {
	err = tx.QueryRowContext(ctx, `SELECT count(CASE WHEN run_id = $2 THEN 1 END), count(CASE WHEN run_id <> $2 THEN 1 END)
		FROM artifact_owner WHERE digest = $1`, digest, run).Scan(&own, &others)
	return own, others, err
}

// OwnersOf implements storage.Owners.
func (s *Store) OwnersOf(ctx context.Context, digest string) (runs []string, err error) {
	err = s.db.Each(ctx, `SELECT run_id FROM artifact_owner WHERE digest = $1 ORDER BY run_id`, []any{digest}, func(scan sqldb.Scan) error {
		var run string
		err := scan(&run)
		runs = append(runs, run)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the runs that artifact %s belongs to: %w", digest, err)
	}
	return runs, nil
}

// Owned implements storage.Owners.
func (s *Store) Owned(ctx context.Context, run string, limit int) (digests []string, err error) {
	err = s.db.Each(ctx, `SELECT digest FROM artifact_owner WHERE run_id = $1 ORDER BY digest LIMIT $2`, []any{run, limit}, func(scan sqldb.Scan) error {
		var digest string
		err := scan(&digest)
		digests = append(digests, digest)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the artifacts of %s: %w", run, err)
	}
	return digests, nil
}

// Disown implements storage.Owners. An artifact that was stored before owners were recorded belongs
// to no run.
func (s *Store) Disown(ctx context.Context, run, digest string, by *fencev1.Fence, remove func() error) error {
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		if err := fence.AdmitRemoval(ctx, tx, s.db.Dialect, led(run, by), by); err != nil {
			return err
		}
		own, others, err := owners(ctx, tx, run, digest)
		if err != nil {
			return err
		}
		if others == 0 && (own > 0 || run == "") {
			if err := remove(); err != nil {
				return err
			}
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM artifact_owner WHERE digest = $1 AND run_id = $2`, digest, run)
		return err
	})
	if err != nil {
		return fmt.Errorf("forget that artifact %s belongs to %s: %w", digest, run, err)
	}
	return nil
}
