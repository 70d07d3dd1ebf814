package sqlite

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/rollout-rl/rollout/services/buffer"
)

// writer implements buffer.Tx.
type writer struct{ *reader }

const (
	putGroupStatement  = `INSERT OR REPLACE INTO prompt_group (ledger, ` + groupColumns + `) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`
	addSampleStatement = `INSERT INTO sample (ledger, position, sample, part, attempt, segment, byte_offset, byte_length, crc32c, ref,
		reward, outcome, min_version, receipt_version, receipt_digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`
	putSegmentStatement = `INSERT OR REPLACE INTO segment (ledger, number, bytes, trimmed) VALUES (?, ?, ?, ?)`
)

// PutGroups implements buffer.Tx.
func (w *writer) PutGroups(ctx context.Context, groups []*buffer.Group) error {
	for _, g := range groups {
		if _, err := w.exec(ctx, "write groups", putGroupStatement, g.Position, g.Attempt, int32(g.State), g.Reason, g.Step, g.Samples,
			g.Pending, g.Failures, g.MinVersion, g.Arrival); err != nil {
			return err
		}
	}
	return nil
}

// AddSamples implements buffer.Tx.
func (w *writer) AddSamples(ctx context.Context, samples []buffer.Sample) error {
	for i := range samples {
		s := &samples[i]
		digest := sql.NullString{String: s.ReceiptDigest, Valid: s.ReceiptDigest != ""}
		if _, err := w.exec(ctx, "write samples", addSampleStatement, s.Position, s.Sample, s.Part, s.Attempt, s.Segment, s.Offset, s.Length,
			s.CRC, s.Ref, s.Reward, int32(s.Outcome), s.MinVersion, s.ReceiptVersion, digest); err != nil {
			return err
		}
	}
	return nil
}

// The planner would read all of a ledger for these, whose rows are few.
const (
	verifyStatement = `UPDATE sample INDEXED BY sample_pending SET receipt_digest = NULL
		WHERE ledger = ? AND receipt_version = ? AND receipt_digest IS NOT NULL`
	takeStatement = `UPDATE prompt_group INDEXED BY prompt_group_step SET state = ?4 WHERE ledger = ?1 AND step = ?2 AND step > 0 AND state = ?3`
)

func (w *writer) exec(ctx context.Context, what, statement string, args ...any) (int64, error) {
	res, err := w.sql.exec(ctx, w.tx, statement, append([]any{w.id}, args...)...)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	return res.RowsAffected()
}

// DropSamples implements buffer.Tx.
func (w *writer) DropSamples(ctx context.Context, position uint64) error {
	_, err := w.exec(ctx, "drop samples", `DELETE FROM sample WHERE ledger = ? AND position = ?`, position)
	return err
}

// Verify implements buffer.Tx.
func (w *writer) Verify(ctx context.Context, version uint64) error {
	_, err := w.exec(ctx, "verify samples", verifyStatement, version)
	return err
}

// PutStep implements buffer.Tx.
func (w *writer) PutStep(ctx context.Context, s *buffer.Step) error {
	_, err := w.exec(ctx, "write step", `INSERT OR REPLACE INTO step (ledger, `+stepColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?, ?)`,
		s.Step, s.Batch, s.Groups, s.Samples, s.Excluded, s.WeightsDigest, s.Chain)
	return err
}

// TakeGroups implements buffer.Tx.
func (w *writer) TakeGroups(ctx context.Context, step uint64, from, to buffer.State) (uint64, error) {
	n, err := w.exec(ctx, "take groups", takeStatement, step, int32(from), int32(to))
	return uint64(n), err
}

// PutWeights implements buffer.Tx.
func (w *writer) PutWeights(ctx context.Context, version uint64, digest string) error {
	_, err := w.exec(ctx, "record weights", `INSERT INTO weights (ledger, version, digest) VALUES (?, ?, ?)`, version, digest)
	return err
}

// PutSegment implements buffer.Tx.
func (w *writer) PutSegment(ctx context.Context, s buffer.Segment) error {
	_, err := w.exec(ctx, "write segment", putSegmentStatement, s.Number, s.Bytes, s.Trimmed)
	return err
}
