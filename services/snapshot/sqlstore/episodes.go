package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/sqldb"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/snapshot"
)

// SaveEpisodes implements snapshot.EpisodeStore.
func (s *Store) SaveEpisodes(ctx context.Context, run string, episodes []*snapshot.Episode, by *fencev1.Fence) error {
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		if err := errors.Join(fence.Live(ctx, tx, s.db.Dialect, run), s.admit(ctx, tx, run, by)); err != nil {
			return err
		}
		for _, e := range episodes {
			record, err := proto.Marshal(e)
			if err != nil {
				return err
			}
			k := e.GetKey()
			if _, err := tx.ExecContext(ctx, `INSERT INTO episode (run_id, epoch, idx, sample, attempt, turns, record) VALUES ($1, $2, $3, $4, $5, $6, $7)
				ON CONFLICT (run_id, epoch, idx, sample) DO UPDATE SET attempt = excluded.attempt, turns = excluded.turns, record = excluded.record
				WHERE episode.attempt < excluded.attempt OR episode.attempt = excluded.attempt AND episode.turns < excluded.turns`,
				run, int64(k.GetEpoch()), int64(k.GetIndex()), int64(k.GetSample()), int64(k.GetAttempt()), int64(e.GetTurns()), record); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("save episodes of %s: %w", run, err)
	}
	return nil
}

// Episodes implements snapshot.EpisodeStore.
func (s *Store) Episodes(ctx context.Context, run string, after snapshot.EpisodePlace, limit int) ([]*snapshot.Episode, error) {
	return s.episodes(ctx, `SELECT record FROM episode WHERE run_id = $1 AND (epoch, idx, sample) > ($2, $3, $4) ORDER BY epoch, idx, sample LIMIT $5`,
		run, int64(after.Epoch), int64(after.Index), after.Sample, limit)
}

// EpisodesOf implements snapshot.EpisodeStore.
func (s *Store) EpisodesOf(ctx context.Context, run string, groups []*snapshotv1.EpisodeGroup) (out []*snapshot.Episode, err error) {
	for _, g := range groups {
		found, err := s.episodes(ctx, `SELECT record FROM episode WHERE run_id = $1 AND epoch = $2 AND idx = $3 ORDER BY sample`, run, int64(g.GetEpoch()), int64(g.GetIndex()))
		if err != nil {
			return nil, err
		}
		out = append(out, found...)
	}
	return out, nil
}

func (s *Store) episodes(ctx context.Context, query string, args ...any) (out []*snapshot.Episode, err error) {
	err = s.db.Each(ctx, query, args, func(scan sqldb.Scan) error {
		var record []byte
		if err := scan(&record); err != nil {
			return err
		}
		e := &snapshot.Episode{}
		out = append(out, e)
		return proto.Unmarshal(record, e)
	})
	if err != nil {
		return nil, fmt.Errorf("read episodes: %w", err)
	}
	return out, nil
}

// DropEpisodes implements snapshot.EpisodeStore.
func (s *Store) DropEpisodes(ctx context.Context, run string, groups []*snapshotv1.EpisodeGroup) error {
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		for _, g := range groups {
			if _, err := tx.ExecContext(ctx, `DELETE FROM episode WHERE run_id = $1 AND epoch = $2 AND idx = $3`, run, int64(g.GetEpoch()), int64(g.GetIndex())); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("drop episodes of %s: %w", run, err)
	}
	return nil
}

// DropRun implements snapshot.EpisodeStore.
func (s *Store) DropRun(ctx context.Context, run string, by *fencev1.Fence) error {
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		bury := func() error { return fence.Delete(ctx, tx, s.db.Dialect, run, by) }
		if by == nil {
			bury = func() error { return fence.Bury(ctx, tx, s.db.Dialect, run) }
		}
		if err := bury(); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `DELETE FROM episode WHERE run_id = $1`, run)
		return err
	})
	if err != nil {
		return fmt.Errorf("drop the episodes of %s: %w", run, err)
	}
	return nil
}
