// Package sqlite keeps ledgers in a SQLite database.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/protobuf/encoding/protojson"

	database "github.com/rollout-rl/rollout/database/buffer"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	"github.com/rollout-rl/rollout/services/buffer"
)

// Store is a buffer.Store. Transactions of all runs take turns on the one writing connection.
type Store struct {
	db      *sqldb.SQLite
	reads   statements
	writes  statements
	configs sync.Map // run -> *bufferv1.LedgerConfig, which never changes
}

// Open opens or makes the database at path.
func Open(ctx context.Context, path string) (*Store, error) {
	db, err := sqldb.OpenSQLite(path)
	if err != nil {
		return nil, err
	}
	s := &Store{db: db}
	if err := s.ready(ctx); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return s, nil
}

func (s *Store) ready(ctx context.Context) (err error) {
	if err := sqldb.Migrate(ctx, s.db.DB, database.Migrations, "sqlite"); err != nil {
		return err
	}
	reads := []string{ledgerQuery, groupsQuery, samplesQuery, batchQuery, pendingQuery, stepQuery, weightsQuery}
	if s.reads, err = prepare(ctx, s.db.Read, reads...); err != nil {
		return err
	}
	s.writes, err = prepare(ctx, s.db.DB, append(reads, saveStatement, putGroupStatement, addSampleStatement, putSegmentStatement)...)
	return err
}

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// Create implements buffer.Store.
func (s *Store) Create(ctx context.Context, run string, config *bufferv1.LedgerConfig) error {
	raw, err := id.CanonicalJSON(config)
	if err != nil {
		return fmt.Errorf("create ledger: %w", err)
	}
	_, err = s.db.ExecContext(ctx, `INSERT INTO ledger (run, config, step) VALUES (?, ?, ?) ON CONFLICT (run) DO NOTHING`,
		run, raw, config.GetFirstStep())
	if err != nil {
		return fmt.Errorf("create ledger of %s: %w", run, err)
	}
	return nil
}

// Runs implements buffer.Store.
func (s *Store) Runs(ctx context.Context) ([]string, error) {
	rows, err := s.db.Read.QueryContext(ctx, `SELECT run FROM ledger WHERE closed = 0 ORDER BY id`)
	if err != nil {
		return nil, fmt.Errorf("list ledgers: %w", err)
	}
	defer rows.Close()
	var runs []string
	for rows.Next() {
		var run string
		if err := rows.Scan(&run); err != nil {
			return nil, fmt.Errorf("list ledgers: %w", err)
		}
		runs = append(runs, run)
	}
	return runs, rows.Err()
}

// View implements buffer.Store.
func (s *Store) View(ctx context.Context, run string, fn func(buffer.Reader) error) error {
	return sqldb.Tx(ctx, s.db.Read, func(tx *sql.Tx) error {
		r, err := s.begin(ctx, tx, s.reads, run)
		if err != nil {
			return err
		}
		return fn(r)
	})
}

// Update implements buffer.Store.
func (s *Store) Update(ctx context.Context, run string, fn func(buffer.Tx) error) error {
	return sqldb.Tx(ctx, s.db, func(tx *sql.Tx) error {
		r, err := s.begin(ctx, tx, s.writes, run)
		if err != nil {
			return err
		}
		r.ledger.Revision++
		if err := fn(&writer{r}); err != nil {
			return err
		}
		return r.save(ctx)
	})
}

// reader implements buffer.Reader within a transaction.
type reader struct {
	tx     *sql.Tx
	sql    statements
	id     int64
	ledger *buffer.Ledger
}

const (
	ledgerQuery = `SELECT id, config, closed, revision, step, chain, arrivals, trimmed, weights_version, weights_digest,
		open, ready, leased, consumed, excluded, dissolved, samples, duplicates, refused, infra_failed FROM ledger WHERE run = ?`
	saveStatement = `UPDATE ledger SET closed = ?, revision = ?, step = ?, chain = ?, arrivals = ?, trimmed = ?,
		weights_version = ?, weights_digest = ?, open = ?, ready = ?, leased = ?, consumed = ?, excluded = ?, dissolved = ?,
		samples = ?, duplicates = ?, refused = ?, infra_failed = ? WHERE id = ?`
)

func (s *Store) begin(ctx context.Context, tx *sql.Tx, st statements, run string) (*reader, error) {
	l := &buffer.Ledger{Run: run}
	r := &reader{tx: tx, sql: st, ledger: l}
	var raw []byte
	g := &l.Groups
	row := tx.StmtContext(ctx, st[ledgerQuery]).QueryRowContext(ctx, run) //nolint:sqlclosecheck // closed with the transaction
	err := row.Scan(
		&r.id, &raw, &l.Closed, &l.Revision, &l.Step, &l.Chain, &l.Arrivals, &l.Trimmed, &l.WeightsVersion, &l.WeightsDigest,
		&g[buffer.Open], &g[buffer.Ready], &g[buffer.Leased], &g[buffer.Consumed], &g[buffer.Excluded], &g[buffer.Dissolved],
		&l.Samples, &l.Duplicates, &l.Refused, &l.InfraFailed)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, buffer.ErrNoLedger.With("run", run)
	}
	if err != nil {
		return nil, fmt.Errorf("read ledger of %s: %w", run, err)
	}
	l.Config, err = s.config(run, raw)
	return r, err
}

// config parses the config of a run once.
func (s *Store) config(run string, raw []byte) (*bufferv1.LedgerConfig, error) {
	if known, ok := s.configs.Load(run); ok {
		return known.(*bufferv1.LedgerConfig), nil
	}
	c := &bufferv1.LedgerConfig{}
	if err := protojson.Unmarshal(raw, c); err != nil {
		return nil, fmt.Errorf("read config of %s: %w", run, err)
	}
	s.configs.Store(run, c)
	return c, nil
}

func (r *reader) save(ctx context.Context) error {
	l := r.ledger
	g := &l.Groups
	_, err := r.sql.exec(ctx, r.tx, saveStatement,
		l.Closed, l.Revision, l.Step, l.Chain, l.Arrivals, l.Trimmed, l.WeightsVersion, l.WeightsDigest,
		g[buffer.Open], g[buffer.Ready], g[buffer.Leased], g[buffer.Consumed], g[buffer.Excluded], g[buffer.Dissolved],
		l.Samples, l.Duplicates, l.Refused, l.InfraFailed, r.id)
	if err != nil {
		return fmt.Errorf("save ledger of %s: %w", l.Run, err)
	}
	return nil
}

// Ledger implements buffer.Reader. Its Config is shared and must not be changed.
func (r *reader) Ledger() *buffer.Ledger { return r.ledger }
