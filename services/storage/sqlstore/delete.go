package sqlstore

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/rollout-rl/rollout/libs/sqldb"
)

// deleteRows is the number of rows that one transaction deletes, so that other writers wait
// briefly.
const deleteRows = 5000

// DeleteRun implements storage.Store.
func (s *Store) DeleteRun(ctx context.Context, run string) error {
	for _, statement := range []string{
		fmt.Sprintf(`DELETE FROM event WHERE sequence IN (SELECT sequence FROM event WHERE run_id = $1 ORDER BY sequence LIMIT %d)`, deleteRows),
		`DELETE FROM metric WHERE run_id = $1 AND name = (SELECT min(name) FROM metric WHERE run_id = $1)`,
	} {
		if err := s.repeat(ctx, statement, run); err != nil {
			return fmt.Errorf("delete the events and metrics of %s: %w", run, err)
		}
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

// Own implements storage.Owners.
func (s *Store) Own(ctx context.Context, run, digest string) error {
	if _, err := s.db.Exec(ctx, `INSERT INTO artifact_owner (digest, run_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`, digest, run); err != nil {
		return fmt.Errorf("record that artifact %s belongs to %s: %w", digest, run, err)
	}
	return nil
}

// OwnersOf implements storage.Owners.
func (s *Store) OwnersOf(ctx context.Context, digests []string) (map[string][]string, error) {
	found := map[string][]string{}
	err := s.db.Each(ctx, `SELECT digest, run_id FROM artifact_owner WHERE digest `+s.db.AmongTexts(1)+` ORDER BY run_id`, []any{list(digests)},
		func(scan sqldb.Scan) error {
			var digest, run string
			err := scan(&digest, &run)
			found[digest] = append(found[digest], run)
			return err
		})
	if err != nil {
		return nil, fmt.Errorf("read the runs that %d artifacts belong to: %w", len(digests), err)
	}
	return found, nil
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

// Disown implements storage.Owners.
func (s *Store) Disown(ctx context.Context, run string, digests []string) error {
	if _, err := s.db.Exec(ctx, `DELETE FROM artifact_owner WHERE run_id = $1 AND digest `+s.db.AmongTexts(2), run, list(digests)); err != nil {
		return fmt.Errorf("forget the artifacts of %s: %w", run, err)
	}
	return nil
}

// list is a list of texts for AmongTexts.
func list(texts []string) string {
	raw, _ := json.Marshal(append([]string{}, texts...)) // texts always marshal
	return string(raw)
}
