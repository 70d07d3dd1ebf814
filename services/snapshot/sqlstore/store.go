// Package sqlstore keeps snapshot manifests in a SQL database.
package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/snapshot"
	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/sqldb"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	"github.com/rollout-rl/rollout/services/snapshot"
)

// Store implements snapshot.Store.
type Store struct{ db *sqldb.DB }

// Open opens the database of the service, creates it if needed, and migrates its schema.
func Open(ctx context.Context, place sqldb.Place) (*Store, error) {
	db, err := sqldb.Ready(ctx, place, "snapshot", sqldb.Full, schema.Migrations)
	if err != nil {
		return nil, err
	}
	return &Store{db: db}, nil
}

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// Lease returns the lease row that decides which replica leads.
func (s *Store) Lease() *lease.Table { return lease.NewTable(s.db, "snapshot") }

// Fenced returns the same store with writes that fail once the fence is lost.
func (s *Store) Fenced(fence sqldb.Fence) *Store {
	fenced := *s
	fenced.db = s.db.Fenced(fence)
	return &fenced
}

// Record implements snapshot.Store.
func (s *Store) Record(ctx context.Context, snap *snapshot.Snapshot, by *fencev1.Fence) (*snapshot.Snapshot, error) {
	manifest, err := proto.Marshal(snap)
	if err != nil {
		return nil, fmt.Errorf("record snapshot: %w", err)
	}
	kept := snap
	err = s.db.Tx(ctx, func(tx *sql.Tx) error {
		kept = snap
		if err := s.admit(ctx, tx, snap.GetRunId(), by); err != nil {
			return err
		}
		res, err := tx.ExecContext(ctx, `INSERT INTO snapshot (snapshot_id, run_id, kind, step, name, manifest) VALUES ($1, $2, $3, $4, $5, $6)
				ON CONFLICT (run_id, kind, step, name) DO NOTHING`,
			snap.GetSnapshotId(), snap.GetRunId(), int32(snap.GetKind()), int64(snap.GetStep()), snap.GetName(), manifest)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			if err == nil {
				kept, err = one(tx.QueryRowContext(ctx, byKey, keyArgs(snapshot.KeyOf(snap))...).Scan)
			}
			return err
		}
		for _, f := range snap.GetFiles() {
			if _, err := tx.ExecContext(ctx, `INSERT INTO snapshot_file (snapshot_id, digest) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
				snap.GetSnapshotId(), f.GetDigest()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("record snapshot of %s at step %d: %w", snap.GetRunId(), snap.GetStep(), err)
	}
	return kept, nil
}

// Update implements snapshot.Store.
func (s *Store) Update(ctx context.Context, snap *snapshot.Snapshot) error {
	manifest, err := proto.Marshal(snap)
	if err != nil {
		return fmt.Errorf("update snapshot: %w", err)
	}
	return s.change(ctx, snap.GetSnapshotId(), nil, `UPDATE snapshot SET manifest = $2 WHERE snapshot_id = $1`, manifest)
}

// Admit implements snapshot.Store.
func (s *Store) Admit(ctx context.Context, run string, by *fencev1.Fence) error {
	if by == nil {
		return nil
	}
	return s.db.Tx(ctx, func(tx *sql.Tx) error { return s.admit(ctx, tx, run, by) })
}

// admit is Admit within a transaction. A fence of incarnation 0 belongs to no run.
func (s *Store) admit(ctx context.Context, tx *sql.Tx, run string, by *fencev1.Fence) error {
	if by.GetIncarnation() == 0 {
		run = ""
	}
	return fence.Admit(ctx, tx, s.db.Dialect, run, by)
}

// Delete implements snapshot.Store.
func (s *Store) Delete(ctx context.Context, by *fencev1.Fence, ids ...string) error {
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		if err := s.admit(ctx, tx, "", by); err != nil {
			return err
		}
		for _, id := range ids {
			if _, err := tx.ExecContext(ctx, `INSERT INTO candidate (digest)
				SELECT digest FROM snapshot_file WHERE snapshot_id = $1 UNION SELECT snapshot_id FROM snapshot WHERE snapshot_id = $1
				ON CONFLICT DO NOTHING`, id); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `DELETE FROM snapshot WHERE snapshot_id = $1 AND NOT pinned`, id); err != nil {
				return err
			}
			var pinned int
			if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM snapshot WHERE snapshot_id = $1`, id).Scan(&pinned); err != nil {
				return err
			}
			if pinned > 0 {
				return snapshot.ErrInUse.With("snapshot", id).WithMessage("snapshot %s is needed: a run started from it", id)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("delete snapshots: %w", err)
	}
	return nil
}

// Pin implements snapshot.Store.
func (s *Store) Pin(ctx context.Context, id string, by *fencev1.Fence) error {
	return s.change(ctx, id, by, `UPDATE snapshot SET pinned = TRUE WHERE snapshot_id = $1`)
}

// Unpin implements snapshot.Store.
func (s *Store) Unpin(ctx context.Context, id string, by *fencev1.Fence) error {
	return s.change(ctx, id, by, `UPDATE snapshot SET pinned = FALSE WHERE snapshot_id = $1`)
}

// change executes an UPDATE of the snapshot with an id, the first argument of the statement.
func (s *Store) change(ctx context.Context, id string, by *fencev1.Fence, statement string, more ...any) error {
	var n int64
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		if err := s.admit(ctx, tx, "", by); err != nil {
			return err
		}
		res, err := tx.ExecContext(ctx, statement, append([]any{id}, more...)...)
		if err != nil {
			return err
		}
		n, err = res.RowsAffected()
		return err
	})
	if err != nil {
		return fmt.Errorf("change snapshot %s: %w", id, err)
	}
	if n == 0 {
		return snapshot.NotFound(id)
	}
	return nil
}

// Note implements snapshot.Store.
func (s *Store) Note(ctx context.Context, names []string) error {
	return s.each(ctx, `INSERT INTO candidate (digest) VALUES ($1) ON CONFLICT DO NOTHING`, names)
}

// Forget implements snapshot.Store.
func (s *Store) Forget(ctx context.Context, names []string) error {
	return s.each(ctx, `DELETE FROM candidate WHERE digest = $1`, names)
}

func (s *Store) each(ctx context.Context, statement string, names []string) error {
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		for _, name := range names {
			if _, err := tx.ExecContext(ctx, statement, name); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("change the candidates of the sweep: %w", err)
	}
	return nil
}

// Get implements snapshot.Reader.
func (s *Store) Get(ctx context.Context, prefix string) (*snapshot.Snapshot, error) {
	found, err := s.query(ctx, `SELECT manifest FROM snapshot WHERE substr(snapshot_id, 1, $1) = $2 ORDER BY snapshot_id LIMIT 2`,
		len(prefix), prefix)
	if err != nil {
		return nil, fmt.Errorf("get snapshot %s: %w", prefix, err)
	}
	switch {
	case len(found) == 0:
		return nil, snapshot.NotFound(prefix)
	case len(found) > 1:
		return nil, snapshot.ErrAmbiguous.With("snapshot", prefix).WithMessage("several snapshots begin with %q", prefix)
	}
	return found[0], nil
}

const byKey = `SELECT manifest FROM snapshot WHERE run_id = $1 AND kind = $2 AND step = $3 AND name = $4`

func keyArgs(key snapshot.Key) []any {
	return []any{key.Run, int32(key.Kind), int64(key.Step), key.Name}
}

// Find implements snapshot.Reader.
func (s *Store) Find(ctx context.Context, key snapshot.Key) (*snapshot.Snapshot, error) {
	found, err := s.query(ctx, byKey, keyArgs(key)...)
	if err == nil && len(found) == 0 {
		err = snapshot.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("find snapshot of %s at step %d: %w", key.Run, key.Step, err)
	}
	return found[0], nil
}

// List implements snapshot.Reader.
func (s *Store) List(ctx context.Context, f snapshot.Filter) ([]*snapshot.Snapshot, error) {
	var where []string
	var args []any
	add := func(condition string, arg any) {
		args = append(args, arg)
		where = append(where, fmt.Sprintf("%s $%d", condition, len(args)))
	}
	if f.Run != "" {
		add("run_id =", f.Run)
	}
	if f.Kind != 0 {
		add("kind =", int32(f.Kind))
	}
	if f.After != "" {
		add("snapshot_id <", f.After)
	}
	if f.Unpinned {
		where = append(where, "NOT pinned")
	}
	if f.Pinned {
		where = append(where, "pinned")
	}
	query := "SELECT manifest FROM snapshot"
	if len(where) > 0 {
		query += " WHERE " + strings.Join(where, " AND ")
	}
	query += " ORDER BY snapshot_id DESC"
	if f.Limit > 0 {
		args = append(args, f.Limit)
		query += fmt.Sprintf(" LIMIT $%d", len(args))
	}
	found, err := s.query(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	return found, nil
}

// Garbage implements snapshot.Reader.
func (s *Store) Garbage(ctx context.Context) (garbage, named []string, err error) {
	err = s.db.Each(ctx, `SELECT digest, EXISTS (SELECT 1 FROM snapshot_file f WHERE f.digest = candidate.digest)
			OR EXISTS (SELECT 1 FROM snapshot s WHERE s.snapshot_id = candidate.digest)
		FROM candidate ORDER BY digest`, nil, func(scan sqldb.Scan) error {
		var digest string
		var used bool
		if err := scan(&digest, &used); err != nil {
			return err
		}
		if used {
			named = append(named, digest)
		} else {
			garbage = append(garbage, digest)
		}
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("read the candidates of the sweep: %w", err)
	}
	return garbage, named, nil
}

func (s *Store) query(ctx context.Context, query string, args ...any) ([]*snapshot.Snapshot, error) {
	var out []*snapshot.Snapshot
	err := s.db.Each(ctx, query, args, func(scan sqldb.Scan) error {
		snap, err := one(scan)
		out = append(out, snap)
		return err
	})
	return out, err
}

func one(scan sqldb.Scan) (*snapshot.Snapshot, error) {
	var manifest []byte
	if err := scan(&manifest); err != nil {
		if errors.Is(err, sql.ErrNoRows) {
			return nil, snapshot.ErrNotFound
		}
		return nil, err
	}
	snap := &snapshot.Snapshot{}
	if err := proto.Unmarshal(manifest, snap); err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	return snap, nil
}
