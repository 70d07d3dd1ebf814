// Package sqlstore keeps drives in a SQL database.
package sqlstore

import (
	"context"
	"database/sql"
	"fmt"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/controller"
	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
	"github.com/rollout-rl/rollout/services/controller"
)

// Store implements controller.Store.
type Store struct{ db *sqldb.DB }

// Open opens the database of the service, creates it if needed, and migrates its schema.
func Open(ctx context.Context, place sqldb.Place) (*Store, error) {
	// A drive is a hint for the next process and the ledger is authoritative, so a commit need not
	// survive a power cut.
	db, err := sqldb.Ready(ctx, place, "learner-controller", sqldb.Normal, schema.Migrations)
	if err != nil {
		return nil, err
	}
	return &Store{db: db}, nil
}

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// Lease returns the lease row that decides which replica leads.
func (s *Store) Lease() *lease.Table { return lease.NewTable(s.db, "learner-controller") }

// Fenced returns the same store with writes that fail once the fence is lost.
func (s *Store) Fenced(fence sqldb.Fence) *Store {
	fenced := *s
	fenced.db = s.db.Fenced(fence)
	return &fenced
}

// Save implements controller.Store.
func (s *Store) Save(ctx context.Context, d *controller.Drive, by *fencev1.Fence) error {
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
	health, gates, evaluation := append([]byte{}, d.Health...), append([]byte{}, d.Gates...), append([]byte{}, d.Evaluation...) // the columns are not NULL
	err = s.db.Tx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO drive (run_id, incarnation, phase, step, active, spec, weights, health, gates, evaluation) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
		ON CONFLICT (run_id) DO UPDATE SET incarnation = excluded.incarnation, phase = excluded.phase, step = excluded.step,
			active = excluded.active, spec = excluded.spec, weights = excluded.weights,
			health = excluded.health, gates = excluded.gates, evaluation = excluded.evaluation`,
			d.Spec.GetRunId(), d.Spec.GetFence().GetIncarnation(), int32(d.Phase), int64(d.Step), d.Active, spec, weights, health, gates, evaluation)
		if err != nil {
			return err
		}
		return fence.Admit(ctx, tx, s.db.Dialect, d.Spec.GetRunId(), by)
	})
	if err != nil {
		return fmt.Errorf("save drive of %s: %w", d.Spec.GetRunId(), err)
	}
	return nil
}

const columns = `SELECT phase, step, active, incarnation, spec, weights, health, gates, evaluation FROM drive `

// Admit implements controller.Store.
func (s *Store) Admit(ctx context.Context, run string, by *fencev1.Fence) error {
	return s.db.Tx(ctx, func(tx *sql.Tx) error { return fence.Admit(ctx, tx, s.db.Dialect, run, by) })
}

// Get implements controller.Store.
func (s *Store) Get(ctx context.Context, run string) (*controller.Drive, error) {
	found, err := s.query(ctx, columns+`WHERE run_id = $1`, run)
	if err != nil {
		return nil, fmt.Errorf("get drive of %s: %w", run, err)
	}
	if len(found) == 0 {
		return nil, controller.ErrNotFound.With("run", run)
	}
	return found[0], nil
}

// Delete implements controller.Store.
func (s *Store) Delete(ctx context.Context, run string, by *fencev1.Fence) error {
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		if err := fence.Delete(ctx, tx, s.db.Dialect, run, by); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `DELETE FROM drive WHERE run_id = $1`, run)
		return err
	})
	if err != nil {
		return fmt.Errorf("delete drive of %s: %w", run, err)
	}
	return nil
}

// Active implements controller.Store.
func (s *Store) Active(ctx context.Context) ([]*controller.Drive, error) {
	all, err := s.query(ctx, columns+`WHERE active ORDER BY run_id`)
	if err != nil {
		return nil, fmt.Errorf("list active drives: %w", err)
	}
	return all, nil
}

func (s *Store) query(ctx context.Context, query string, args ...any) (all []*controller.Drive, err error) {
	err = s.db.Each(ctx, query, args, func(scan sqldb.Scan) error {
		d, err := read(scan)
		all = append(all, d)
		return err
	})
	return all, err
}

func read(scan sqldb.Scan) (*controller.Drive, error) {
	d := &controller.Drive{Spec: &learnerv1.StartRunRequest{}}
	var phase int32
	var step, incarnation int64
	var spec, weights []byte
	if err := scan(&phase, &step, &d.Active, &incarnation, &spec, &weights, &d.Health, &d.Gates, &d.Evaluation); err != nil {
		return nil, fmt.Errorf("read drive: %w", err)
	}
	d.Phase, d.Step = learnerv1.Phase(phase), uint64(step)
	if err := proto.Unmarshal(spec, d.Spec); err != nil {
		return nil, fmt.Errorf("read drive: %w", err)
	}
	if d.Spec.Fence == nil { // stored by an earlier version
		d.Spec.Fence = &fencev1.Fence{Incarnation: uint32(incarnation), Role: names.SchedulerService}
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
