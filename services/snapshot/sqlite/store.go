// Package sqlite keeps snapshot manifests in one SQLite file.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/snapshot"
	"github.com/rollout-rl/rollout/libs/sqldb"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/snapshot"
)

// Store implements snapshot.Store.
type Store struct{ db *sqldb.SQLite }

// Open opens or makes the database at path and brings its schema up to date.
func Open(ctx context.Context, path string) (*Store, error) {
	db, err := sqldb.OpenSQLite(path)
	if err != nil {
		return nil, err
	}
	if err := sqldb.Migrate(ctx, db.DB, schema.Migrations, "sqlite"); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &Store{db: db}, nil
}

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// Record implements snapshot.Store.
func (s *Store) Record(ctx context.Context, snap *snapshot.Snapshot) (*snapshot.Snapshot, error) {
	manifest, err := proto.Marshal(snap)
	if err != nil {
		return nil, fmt.Errorf("record snapshot: %w", err)
	}
	kept := snap
	err = sqldb.Tx(ctx, s.db, func(tx *sql.Tx) error {
		first, err := one(tx.QueryRowContext(ctx, `SELECT manifest FROM snapshot WHERE run_id = ? AND kind = ? AND step = ?`,
			snap.GetRunId(), int32(snap.GetKind()), int64(snap.GetStep())))
		if err == nil {
			kept = first
			return nil
		}
		if !errors.Is(err, snapshot.ErrNotFound) {
			return err
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO snapshot (snapshot_id, run_id, kind, step, manifest) VALUES (?, ?, ?, ?, ?)`,
			snap.GetSnapshotId(), snap.GetRunId(), int32(snap.GetKind()), int64(snap.GetStep()), manifest); err != nil {
			return err
		}
		for _, f := range snap.GetFiles() {
			if _, err := tx.ExecContext(ctx, `INSERT INTO snapshot_file (snapshot_id, digest) VALUES (?, ?) ON CONFLICT DO NOTHING`,
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

// Delete implements snapshot.Store.
func (s *Store) Delete(ctx context.Context, ids ...string) error {
	err := sqldb.Tx(ctx, s.db, func(tx *sql.Tx) error {
		for _, id := range ids {
			if _, err := tx.ExecContext(ctx, `INSERT INTO candidate (digest)
				SELECT digest FROM snapshot_file WHERE snapshot_id = ? ON CONFLICT DO NOTHING`, id); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `DELETE FROM snapshot WHERE snapshot_id = ?`, id); err != nil {
				return err
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
func (s *Store) Pin(ctx context.Context, id string) error {
	res, err := s.db.ExecContext(ctx, `UPDATE snapshot SET pinned = 1 WHERE snapshot_id = ?`, id)
	if err != nil {
		return fmt.Errorf("pin snapshot %s: %w", id, err)
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return errors.Join(err, snapshot.ErrNotFound.With("snapshot", id))
	}
	return nil
}

// Note implements snapshot.Store.
func (s *Store) Note(ctx context.Context, digests []string) error {
	return s.each(ctx, `INSERT INTO candidate (digest) VALUES (?) ON CONFLICT DO NOTHING`, digests)
}

// Forget implements snapshot.Store.
func (s *Store) Forget(ctx context.Context, digests []string) error {
	return s.each(ctx, `DELETE FROM candidate WHERE digest = ?`, digests)
}

func (s *Store) each(ctx context.Context, statement string, digests []string) error {
	err := sqldb.Tx(ctx, s.db, func(tx *sql.Tx) error {
		for _, d := range digests {
			if _, err := tx.ExecContext(ctx, statement, d); err != nil {
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
	found, err := s.query(ctx, `SELECT manifest FROM snapshot WHERE substr(snapshot_id, 1, ?) = ? ORDER BY snapshot_id LIMIT 2`,
		len(prefix), prefix)
	if err != nil {
		return nil, fmt.Errorf("get snapshot %s: %w", prefix, err)
	}
	switch {
	case len(found) == 0:
		return nil, snapshot.ErrNotFound.With("snapshot", prefix)
	case len(found) > 1:
		return nil, snapshot.ErrAmbiguous.With("snapshot", prefix)
	}
	return found[0], nil
}

// Find implements snapshot.Reader.
func (s *Store) Find(ctx context.Context, run string, kind snapshotv1.SnapshotKind, step uint64) (*snapshot.Snapshot, error) {
	snap, err := one(s.db.Read.QueryRowContext(ctx, `SELECT manifest FROM snapshot WHERE run_id = ? AND kind = ? AND step = ?`,
		run, int32(kind), int64(step)))
	if err != nil {
		return nil, fmt.Errorf("find snapshot of %s at step %d: %w", run, step, err)
	}
	return snap, nil
}

// List implements snapshot.Reader.
func (s *Store) List(ctx context.Context, f snapshot.Filter) ([]*snapshot.Snapshot, error) {
	var where []string
	var args []any
	add := func(condition string, arg any) { where, args = append(where, condition), append(args, arg) }
	if f.Run != "" {
		add("run_id = ?", f.Run)
	}
	if f.Kind != 0 {
		add("kind = ?", int32(f.Kind))
	}
	if f.After != "" {
		add("snapshot_id < ?", f.After)
	}
	if f.Unpinned {
		where = append(where, "pinned = 0")
	}
	query := "SELECT manifest FROM snapshot"
	if len(where) > 0 {
		query += " WHERE " + strings.Join(where, " AND ")
	}
	query += " ORDER BY snapshot_id DESC"
	if f.Limit > 0 {
		query += " LIMIT ?"
		args = append(args, f.Limit)
	}
	found, err := s.query(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	return found, nil
}

// Garbage implements snapshot.Reader. It reads through the writing connection: what was just deleted must show.
func (s *Store) Garbage(ctx context.Context) (garbage, named []string, err error) {
	rows, err := s.db.QueryContext(ctx, `SELECT digest, EXISTS (SELECT 1 FROM snapshot_file f WHERE f.digest = candidate.digest)
		FROM candidate ORDER BY digest`)
	if err != nil {
		return nil, nil, fmt.Errorf("read the candidates of the sweep: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var digest string
		var used bool
		if err := rows.Scan(&digest, &used); err != nil {
			return nil, nil, fmt.Errorf("read the candidates of the sweep: %w", err)
		}
		if used {
			named = append(named, digest)
		} else {
			garbage = append(garbage, digest)
		}
	}
	return garbage, named, rows.Err()
}

func (s *Store) query(ctx context.Context, query string, args ...any) ([]*snapshot.Snapshot, error) {
	rows, err := s.db.Read.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []*snapshot.Snapshot
	for rows.Next() {
		snap, err := one(rows)
		if err != nil {
			return nil, err
		}
		out = append(out, snap)
	}
	return out, rows.Err()
}

func one(row interface{ Scan(...any) error }) (*snapshot.Snapshot, error) {
	var manifest []byte
	if err := row.Scan(&manifest); err != nil {
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
