package sqlstore

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/rollout-rl/rollout/libs/sqldb"
)

// WithUnused implements ledger.Store.
func (s *Store) WithUnused(ctx context.Context) (runs []string, err error) {
	err = s.db.Each(ctx, `SELECT run FROM ledger WHERE EXISTS (SELECT 1 FROM unused_payload u WHERE u.ledger = ledger.id) ORDER BY id`, nil,
		func(scan sqldb.Scan) error {
			var run string
			err := scan(&run)
			runs = append(runs, run)
			return err
		})
	if err != nil {
		return nil, fmt.Errorf("list ledgers with unused payloads: %w", err)
	}
	return runs, nil
}

// Unused implements ledger.Reader.
func (r *reader) Unused(ctx context.Context, limit int) (unused, needed []string, err error) {
	query := `SELECT u.ref, EXISTS (SELECT 1 FROM sample s JOIN prompt_group g ON g.ledger = s.ledger AND g.position = s.position
			WHERE s.ledger = u.ledger AND s.ref = u.ref AND s.ref <> '' AND NOT (g.step > 0 AND g.step <= $2))
		FROM unused_payload u WHERE u.ledger = $1 ORDER BY u.ref LIMIT $3`
	err = r.list(ctx, "unused payloads", query, []any{r.id, r.ledger.Trimmed, limit}, func(scan func(...any) error) error {
		var ref string
		var used bool
		if err := scan(&ref, &used); err != nil {
			return err
		}
		if used {
			needed = append(needed, ref)
		} else {
			unused = append(unused, ref)
		}
		return nil
	})
	return unused, needed, err
}

// MarkUnused implements ledger.Tx.
func (w *writer) MarkUnused(ctx context.Context, refs []string) error {
	for _, ref := range refs {
		if _, err := w.exec(ctx, "mark a payload as unused", `INSERT INTO unused_payload (ledger, ref) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
			sqldb.Text(ref)); err != nil {
			return err
		}
	}
	return nil
}

// MarkTrimmed implements ledger.Tx.
func (w *writer) MarkTrimmed(ctx context.Context, after, through uint64) error {
	_, err := w.exec(ctx, "mark trimmed payloads as unused", w.sql.markTrimmed, after, through)
	return err
}

// Forget implements ledger.Tx.
func (w *writer) Forget(ctx context.Context, refs []string) error {
	raw, err := json.Marshal(refs)
	if err != nil {
		return fmt.Errorf("forget payloads: %w", err)
	}
	_, err = w.exec(ctx, "forget payloads", w.sql.forget, string(raw))
	return err
}

// deletePositions is the number of positions whose rows one transaction deletes.
const deletePositions = 2000

// Delete implements ledger.Store.
func (s *Store) Delete(ctx context.Context, run string) error {
	var id int64
	found := false
	err := s.db.Each(ctx, `SELECT id FROM ledger WHERE run = $1`, []any{run}, func(scan sqldb.Scan) error { found = true; return scan(&id) })
	if err == nil && found {
		err = s.delete(ctx, id)
	}
	if err != nil {
		return fmt.Errorf("delete the ledger of %s: %w", run, err)
	}
	s.configs.Delete(run)
	return nil
}

func (s *Store) delete(ctx context.Context, id int64) error {
	for _, table := range []struct{ name, key string }{
		{"sample", "position"}, {"prompt_group", "position"}, {"step", "step"}, {"weights", "version"}, {"lineage", "lineage"}, {"segment", "number"},
	} {
		statement := fmt.Sprintf(`DELETE FROM %s WHERE ledger = $1 AND %s < (SELECT min(%s) FROM %s WHERE ledger = $1) + %d`,
			table.name, table.key, table.key, table.name, deletePositions)
		for {
			n, err := s.db.Exec(ctx, statement, id)
			if err != nil {
				return err
			}
			if n == 0 {
				break
			}
		}
	}
	for _, statement := range []string{`DELETE FROM unused_payload WHERE ledger = $1`, `DELETE FROM ledger WHERE id = $1`} {
		if _, err := s.db.Exec(ctx, statement, id); err != nil {
			return err
		}
	}
	return nil
}
