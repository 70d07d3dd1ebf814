// Package sqlite keeps drives in one SQLite file.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/controller"
	"github.com/rollout-rl/rollout/libs/sqldb"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
	"github.com/rollout-rl/rollout/services/controller"
)

// Store implements controller.Store.
type Store struct{ db *sqldb.SQLite }

// Open opens or makes the database at path and brings its schema up to date.
func Open(ctx context.Context, path string) (*Store, error) {
	// A drive is a hint for the next process; the ledger is what counts. So a commit need not survive a power cut.
	db, err := sqldb.OpenSQLiteWith(path, sqldb.Normal)
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

// Save implements controller.Store.
func (s *Store) Save(ctx context.Context, d *controller.Drive) error {
	spec, err := proto.Marshal(d.Spec)
	if err != nil {
		return fmt.Errorf("save drive: %w", err)
	}
	weights := []byte{}
	if d.Weights != nil {
		if weights, err = proto.Marshal(d.Weights); err != nil {
			return fmt.Errorf("save drive: %w", err)
		}
	}
	_, err = s.db.ExecContext(ctx, `INSERT INTO drive (run_id, incarnation, phase, step, active, spec, weights) VALUES (?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (run_id) DO UPDATE SET incarnation = excluded.incarnation, phase = excluded.phase, step = excluded.step,
			active = excluded.active, spec = excluded.spec, weights = excluded.weights`,
		d.Spec.GetRunId(), d.Spec.GetIncarnation(), int32(d.Phase), int64(d.Step), d.Active, spec, weights)
	if err != nil {
		return fmt.Errorf("save drive of %s: %w", d.Spec.GetRunId(), err)
	}
	return nil
}

const columns = `SELECT phase, step, active, spec, weights FROM drive `

// Get implements controller.Store.
func (s *Store) Get(ctx context.Context, run string) (*controller.Drive, error) {
	d, err := scan(s.db.Read.QueryRowContext(ctx, columns+`WHERE run_id = ?`, run))
	if errors.Is(err, sql.ErrNoRows) {
		return nil, controller.ErrNotFound.With("run", run)
	}
	return d, err
}

// Active implements controller.Store.
func (s *Store) Active(ctx context.Context) ([]*controller.Drive, error) {
	rows, err := s.db.Read.QueryContext(ctx, columns+`WHERE active ORDER BY run_id`)
	if err != nil {
		return nil, fmt.Errorf("list active drives: %w", err)
	}
	defer func() { _ = rows.Close() }()
	var all []*controller.Drive
	for rows.Next() {
		d, err := scan(rows)
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, rows.Err()
}

func scan(row interface{ Scan(dest ...any) error }) (*controller.Drive, error) {
	d := &controller.Drive{Spec: &learnerv1.StartRunRequest{}}
	var phase int32
	var step int64
	var spec, weights []byte
	if err := row.Scan(&phase, &step, &d.Active, &spec, &weights); err != nil {
		return nil, fmt.Errorf("read drive: %w", err)
	}
	d.Phase, d.Step = learnerv1.Phase(phase), uint64(step)
	if err := proto.Unmarshal(spec, d.Spec); err != nil {
		return nil, fmt.Errorf("read drive: %w", err)
	}
	if len(weights) == 0 {
		return d, nil
	}
	d.Weights = &weightsv1.WeightsManifest{}
	if err := proto.Unmarshal(weights, d.Weights); err != nil {
		return nil, fmt.Errorf("read drive: %w", err)
	}
	return d, nil
}

var _ controller.Store = (*Store)(nil)
