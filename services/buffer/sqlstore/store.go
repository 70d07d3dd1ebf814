// Package sqlstore stores ledgers in a SQL database.
package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/protobuf/encoding/protojson"

	database "github.com/rollout-rl/rollout/database/buffer"
	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

// Store is a ledger.Store. SQLite serializes the transactions of all runs, PostgreSQL those of one
// run.
type Store struct {
	db      *sqldb.DB
	sql     *statements
	configs *sync.Map // run with an open ledger -> *bufferv1.LedgerConfig, which is immutable
}

// Open opens or creates the service's database and migrates its schema. Commits survive a power
// cut.
func Open(ctx context.Context, place sqldb.Place) (*Store, error) {
	return OpenWith(ctx, place, sqldb.Full)
}

// OpenWith is Open with another durability of commits.
func OpenWith(ctx context.Context, place sqldb.Place, d sqldb.Durability) (*Store, error) {
	db, err := sqldb.Ready(ctx, place, "buffer", d, database.Migrations)
	if err != nil {
		return nil, err
	}
	s := &Store{db: db, sql: newStatements(db), configs: &sync.Map{}}
	if err := s.sql.prepare(ctx, db); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return s, nil
}

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// Lease is the leader election of the replicas.
func (s *Store) Lease() *lease.Table { return lease.NewTable(s.db, "buffer") }

// Fenced is the same store with a fence that every write must pass.
func (s *Store) Fenced(fence sqldb.Fence) *Store {
	fenced := *s
	fenced.db = s.db.Fenced(fence)
	return &fenced
}

// Create implements ledger.Store.
func (s *Store) Create(ctx context.Context, run string, config *bufferv1.LedgerConfig, by *fencev1.Fence) error {
	raw, err := id.CanonicalJSON(config)
	if err != nil {
		return fmt.Errorf("create ledger: %w", err)
	}
	err = s.db.Tx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `INSERT INTO ledger (run, config, step, closed) VALUES ($1, $2, $3, $4) ON CONFLICT (run) DO NOTHING`,
			run, raw, config.GetFirstStep(), config.GetSeed() != nil); err != nil {
			return err
		}
		return fence.Admit(ctx, tx, s.db.Dialect, run, by)
	})
	if err != nil {
		return fmt.Errorf("create ledger of %s: %w", run, err)
	}
	return nil
}

// Bury implements ledger.Store.
func (s *Store) Bury(ctx context.Context, run string, by *fencev1.Fence) error {
	return s.db.Tx(ctx, func(tx *sql.Tx) error { return fence.Delete(ctx, tx, s.db.Dialect, run, by) })
}

// Runs implements ledger.Store.
func (s *Store) Runs(ctx context.Context) ([]string, error) {
	var runs []string
	err := s.db.Each(ctx, `SELECT run FROM ledger WHERE NOT closed ORDER BY id`, nil, func(scan sqldb.Scan) error {
		var run string
		err := scan(&run)
		runs = append(runs, run)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list ledgers: %w", err)
	}
	return runs, nil
}

// View implements ledger.Store.
func (s *Store) View(ctx context.Context, run string, fn func(ledger.Reader) error) error {
	return s.db.View(ctx, func(tx *sql.Tx) error {
		r, err := s.begin(ctx, tx, false, run)
		if err != nil {
			return err
		}
		return fn(r)
	})
}

// Update implements ledger.Store.
func (s *Store) Update(ctx context.Context, run string, fn func(ledger.Tx) error) error {
	return s.db.Tx(ctx, s.change(ctx, run, fn))
}

// change is a transaction that runs fn and saves the ledger.
func (s *Store) change(ctx context.Context, run string, fn func(ledger.Tx) error) func(*sql.Tx) error {
	return func(tx *sql.Tx) error {
		r, err := s.begin(ctx, tx, true, run)
		if err != nil {
			return err
		}
		r.ledger.Revision++
		if err := fn(&writer{r}); err != nil {
			return err
		}
		return r.save(ctx)
	}
}

// none is a ledger without failures, in its row.
const none = "{}"

// reader implements ledger.Reader within a transaction.
type reader struct {
	tx      *sql.Tx
	sql     *statements
	dialect sqldb.Dialect
	writes  bool
	id      int64
	ledger  *ledger.Ledger
}

// begin reads the ledger, and locks it if the transaction writes.
func (s *Store) begin(ctx context.Context, tx *sql.Tx, writes bool, run string) (*reader, error) {
	l := &ledger.Ledger{Run: run}
	r := &reader{tx: tx, sql: s.sql, dialect: s.db.Dialect, writes: writes, ledger: l}
	var raw []byte
	var failures string
	g := &l.Groups
	text := s.sql.ledger
	if writes {
		text = s.sql.lock
	}
	found := false
	err := r.list(ctx, "ledger", text, []any{run}, func(scan func(...any) error) error {
		found = true
		return scan(
			&r.id, &raw, &l.Closed, &l.Revision, &l.Step, &l.Chain, &l.Arrivals, &l.Trimmed, &l.WeightsVersion, &l.WeightsDigest,
			&g[ledger.Open], &g[ledger.Ready], &g[ledger.Leased], &g[ledger.Consumed], &g[ledger.Excluded], &g[ledger.Dissolved],
			&l.Samples, &l.Duplicates, &l.Refused, &l.InfraFailed, &l.Skipped, &failures, &l.Lineage)
	})
	if err != nil {
		return nil, fmt.Errorf("read ledger of %s: %w", run, err)
	}
	if !found {
		return nil, ledger.ErrNoLedger.With("run", run)
	}
	if failures != none {
		if err := json.Unmarshal([]byte(failures), &l.Failures); err != nil {
			return nil, fmt.Errorf("read failures of %s: %w", run, err)
		}
	}
	l.Config, err = s.config(run, raw, l.Closed)
	return r, err
}

// config parses the config of a run, of an open ledger once.
func (s *Store) config(run string, raw []byte, closed bool) (*bufferv1.LedgerConfig, error) {
	if closed {
		s.configs.Delete(run)
	} else if known, ok := s.configs.Load(run); ok {
		return known.(*bufferv1.LedgerConfig), nil
	}
	c := &bufferv1.LedgerConfig{}
	if err := protojson.Unmarshal(raw, c); err != nil {
		return nil, fmt.Errorf("read config of %s: %w", run, err)
	}
	if !closed {
		s.configs.Store(run, c)
	}
	return c, nil
}

func (r *reader) save(ctx context.Context) error {
	l := r.ledger
	g := &l.Groups
	failures := none
	if len(l.Failures) > 0 {
		raw, err := json.Marshal(l.Failures)
		if err != nil {
			return fmt.Errorf("save failures of %s: %w", l.Run, err)
		}
		failures = string(raw)
	}
	_, err := r.exec(ctx, r.sql.save,
		l.Closed, l.Revision, l.Step, l.Chain, l.Arrivals, l.Trimmed, l.WeightsVersion, l.WeightsDigest,
		g[ledger.Open], g[ledger.Ready], g[ledger.Leased], g[ledger.Consumed], g[ledger.Excluded], g[ledger.Dissolved],
		l.Samples, l.Duplicates, l.Refused, l.InfraFailed, l.Skipped, failures, l.Lineage, r.id)
	if err != nil {
		return fmt.Errorf("save ledger of %s: %w", l.Run, err)
	}
	return nil
}

// Admit implements ledger.Reader.
func (r *reader) Admit(ctx context.Context, by *fencev1.Fence) error {
	if r.writes {
		return fence.Admit(ctx, r.tx, r.dialect, r.ledger.Run, by)
	}
	return fence.Check(ctx, r.tx, r.ledger.Run, by)
}

// Ledger implements ledger.Reader. Its Config is shared and must not be modified.
func (r *reader) Ledger() *ledger.Ledger { return r.ledger }
