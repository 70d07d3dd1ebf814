package sqlstore

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

// writer implements ledger.Tx.
type writer struct{ *reader }

// PutGroups implements ledger.Tx.
func (w *writer) PutGroups(ctx context.Context, groups []*ledger.Group) error {
	return w.rows(ctx, "write groups", w.sql.putGroups, len(groups), func(i int) []any {
		g := groups[i]
		return []any{g.Position, g.Attempt, int32(g.State), sqldb.Text(g.Reason), g.Step, g.Samples, g.Pending, g.Failures, g.MinVersion, g.Arrival, g.TokenRewards}
	})
}

// AddSamples implements ledger.Tx.
func (w *writer) AddSamples(ctx context.Context, samples []ledger.Sample) error {
	return w.rows(ctx, "write samples", w.sql.addSamples, len(samples), func(i int) []any {
		s := &samples[i]
		digest := sql.NullString{String: sqldb.Text(s.ReceiptDigest), Valid: s.ReceiptDigest != ""}
		return []any{s.Position, s.Sample, s.Part, s.Attempt, s.Segment, s.Offset, s.Length, s.CRC, sqldb.Text(s.Ref), s.Reward, int32(s.Outcome),
			s.MinVersion, s.ReceiptVersion, digest, s.Times}
	})
}

// rows writes n rows in chunks.
func (w *writer) rows(ctx context.Context, what string, insert map[int]string, n int, row func(i int) []any) error {
	for _, size := range chunks {
		for ; n >= size; n -= size {
			args := make([]any, 0, 16*size)
			for i := n - size; i < n; i++ {
				args = append(append(args, w.id), row(i)...)
			}
			if _, err := w.reader.exec(ctx, insert[size], args...); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
		}
	}
	return nil
}

func (w *writer) exec(ctx context.Context, what, statement string, args ...any) (int64, error) {
	res, err := w.reader.exec(ctx, statement, append([]any{w.id}, args...)...)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	return res.RowsAffected()
}

// DropSamples implements ledger.Tx.
func (w *writer) DropSamples(ctx context.Context, position uint64) error {
	if _, err := w.exec(ctx, "mark dropped payloads as unused", `INSERT INTO unused_payload (ledger, ref)
		SELECT DISTINCT ledger, ref FROM sample WHERE ledger = $1 AND position = $2 AND ref <> '' ON CONFLICT DO NOTHING`, position); err != nil {
		return err
	}
	_, err := w.exec(ctx, "drop samples", `DELETE FROM sample WHERE ledger = $1 AND position = $2`, position)
	return err
}

// Verify implements ledger.Tx.
func (w *writer) Verify(ctx context.Context, version uint64) error {
	_, err := w.exec(ctx, "verify samples", w.sql.verify, version)
	return err
}

// PutStep implements ledger.Tx.
func (w *writer) PutStep(ctx context.Context, s *ledger.Step) error {
	_, err := w.exec(ctx, "write step", `INSERT INTO step (ledger, `+stepColumns+`) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
		ON CONFLICT (ledger, step) DO UPDATE SET batch = excluded.batch, group_count = excluded.group_count, sample_count = excluded.sample_count,
			excluded_count = excluded.excluded_count, weights_digest = excluded.weights_digest, chain = excluded.chain,
			zero_count = excluded.zero_count, zero_reward = excluded.zero_reward, end_position = excluded.end_position, lineage = excluded.lineage`,
		s.Step, s.Batch, s.Groups, s.Samples, s.Excluded, s.WeightsDigest, s.Chain, s.Zero, s.ZeroReward, s.End, s.Lineage)
	return err
}

// TakeGroups implements ledger.Tx.
func (w *writer) TakeGroups(ctx context.Context, step uint64, from, to ledger.State) (uint64, error) {
	n, err := w.exec(ctx, "take groups", w.sql.take, step, int32(from), int32(to))
	return uint64(n), err
}

// PutWeights implements ledger.Tx.
func (w *writer) PutWeights(ctx context.Context, v ledger.Weights) error {
	_, err := w.exec(ctx, "record weights", `INSERT INTO weights (ledger, version, lineage, digest, retrained) VALUES ($1, $2, $3, $4, $5)`,
		v.Version, v.Lineage, v.Digest, v.Retrained)
	return err
}

// PutLineage implements ledger.Tx.
func (w *writer) PutLineage(ctx context.Context, l ledger.Lineage) error {
	_, err := w.exec(ctx, "record lineage", `INSERT INTO lineage (ledger, lineage, first_version, step, old_lineage) VALUES ($1, $2, $3, $4, $5)`,
		l.Number, l.First, l.Step, int32(l.Old))
	return err
}

// PutSegment implements ledger.Tx.
func (w *writer) PutSegment(ctx context.Context, s ledger.Segment) error {
	_, err := w.exec(ctx, "write segment", w.sql.putSegment, s.Number, s.Bytes, s.Trimmed)
	return err
}
