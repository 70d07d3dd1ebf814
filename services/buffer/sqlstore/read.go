package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

// list runs a query and scans each row with next.
func (r *reader) list(ctx context.Context, what, query string, args []any, next func(scan func(...any) error) error) error {
	rows, err := r.query(ctx, query, args...)
	if err != nil {
		return fmt.Errorf("read %s: %w", what, err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := next(rows.Scan); err != nil {
			return fmt.Errorf("read %s: %w", what, err)
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("read %s: %w", what, err)
	}
	return nil
}

// set is a list of numbers for json_each.
func set(numbers []uint64) string {
	if len(numbers) == 0 {
		return "[]"
	}
	b, _ := json.Marshal(numbers) // numbers always marshal
	return string(b)
}

func (r *reader) groups(ctx context.Context, where string, args ...any) ([]*ledger.Group, error) {
	return r.groupsFrom(ctx, "prompt_group", where, args...)
}

func (r *reader) groupsFrom(ctx context.Context, table, where string, args ...any) ([]*ledger.Group, error) {
	return r.queryGroups(ctx, `SELECT `+groupColumns+` FROM `+table+` WHERE ledger = $1 AND `+where, args...)
}

func (r *reader) queryGroups(ctx context.Context, query string, args ...any) (out []*ledger.Group, err error) {
	err = r.list(ctx, "groups", query, append([]any{r.id}, args...), func(scan func(...any) error) error {
		g := &ledger.Group{}
		out = append(out, g)
		return scan(&g.Position, &g.Attempt, &g.State, &g.Reason, &g.Step, &g.Samples, &g.Pending, &g.Failures, &g.MinVersion, &g.Arrival, &g.TokenRewards)
	})
	return out, err
}

// Groups implements ledger.Reader.
func (r *reader) Groups(ctx context.Context, positions []uint64) (map[uint64]*ledger.Group, error) {
	found, err := r.queryGroups(ctx, r.sql.groups, set(positions))
	if err != nil {
		return nil, err
	}
	out := make(map[uint64]*ledger.Group, len(found))
	for _, g := range found {
		out[g.Position] = g
	}
	return out, nil
}

// ListGroups implements ledger.Reader.
func (r *reader) ListGroups(ctx context.Context, q ledger.GroupQuery) ([]*ledger.Group, error) {
	table, where, args := "prompt_group", `position >= $2`, []any{q.From}
	value := func(v any) string {
		args = append(args, v)
		return fmt.Sprintf("$%d", len(args)+1) // $1 is the ledger
	}
	if q.To > 0 {
		where += ` AND position < ` + value(q.To)
	}
	switch len(q.States) {
	case 0:
	case 1: // a literal, so that the partial index of live states can be used
		where += fmt.Sprintf(` AND state = %d`, q.States[0])
		if s := q.States[0]; s != ledger.Consumed && s != ledger.Excluded {
			table, where = r.sql.live, where+` AND state IN (1, 2, 3, 6)`
		}
	default:
		states := make([]string, len(q.States))
		for i, s := range q.States {
			states[i] = fmt.Sprint(int(s))
		}
		where += ` AND state IN (` + strings.Join(states, ", ") + `)`
	}
	where += ` ORDER BY position`
	if q.Limit > 0 {
		where += ` LIMIT ` + value(q.Limit)
	}
	return r.groupsFrom(ctx, table, where, args...)
}

// Arrived implements ledger.Reader.
func (r *reader) Arrived(ctx context.Context, limit int) ([]*ledger.Group, error) {
	return r.groups(ctx, `arrival > 0 AND step = 0 ORDER BY arrival LIMIT $2`, limit)
}

// samples reads rows of sample, joined with their groups.
func (r *reader) samples(ctx context.Context, query string, args ...any) (out []ledger.Sample, err error) {
	err = r.list(ctx, "samples", query, append([]any{r.id}, args...), func(scan func(...any) error) error {
		var s ledger.Sample
		var digest sql.NullString
		err := scan(&s.Position, &s.Sample, &s.Part, &s.Attempt, &s.Segment, &s.Offset, &s.Length, &s.CRC, &s.Ref, &s.Reward,
			&s.Outcome, &s.MinVersion, &s.ReceiptVersion, &digest, &s.Times)
		s.ReceiptDigest = digest.String
		out = append(out, s)
		return err
	})
	return out, err
}

// Samples implements ledger.Reader.
func (r *reader) Samples(ctx context.Context, positions []uint64) ([]ledger.Sample, error) {
	if len(positions) == 0 {
		return nil, nil
	}
	return r.samples(ctx, r.sql.samples, set(positions))
}

// BatchSamples implements ledger.Reader.
func (r *reader) BatchSamples(ctx context.Context, step uint64) ([]ledger.Sample, error) {
	return r.samples(ctx, r.sql.batch, step)
}

// Taken implements ledger.Reader.
func (r *reader) Taken(ctx context.Context, step uint64) ([]*ledger.Group, error) {
	return r.queryGroups(ctx, r.sql.taken, step)
}

// Pending implements ledger.Reader.
func (r *reader) Pending(ctx context.Context, version uint64) ([]ledger.Sample, error) {
	return r.samples(ctx, r.sql.pending, version)
}

func scanStep(scan func(...any) error) (*ledger.Step, error) {
	s := &ledger.Step{}
	return s, scan(&s.Step, &s.Batch, &s.Groups, &s.Samples, &s.Excluded, &s.WeightsDigest, &s.Chain, &s.Zero, &s.ZeroReward, &s.End, &s.Lineage)
}

// Step implements ledger.Reader.
func (r *reader) Step(ctx context.Context, step uint64) (*ledger.Step, error) {
	var found *ledger.Step
	err := r.list(ctx, "step", r.sql.step, []any{r.id, step}, func(scan func(...any) error) (err error) {
		found, err = scanStep(scan)
		return err
	})
	return found, err
}

// Steps implements ledger.Reader.
func (r *reader) Steps(ctx context.Context, q ledger.StepQuery) (out []*ledger.Step, err error) {
	order := "step"
	if q.Newest {
		order = "step DESC"
	}
	where, args := `ledger = $1 AND step >= $2 AND chain <> ''`, []any{r.id, q.From, q.Limit}
	if q.To > 0 {
		where, args = where+` AND step < $4`, append(args, q.To)
	}
	query := `SELECT ` + stepColumns + ` FROM step WHERE ` + where + ` ORDER BY ` + order + ` LIMIT $3`
	err = r.list(ctx, "steps", query, args, func(scan func(...any) error) error {
		s, err := scanStep(scan)
		out = append(out, s)
		return err
	})
	if q.Newest {
		slices.Reverse(out)
	}
	return out, err
}

// Count implements ledger.Reader.
func (r *reader) Count(ctx context.Context, from, end uint64) (n uint64, err error) {
	query := `SELECT count(*) FROM prompt_group WHERE ledger = $1 AND position >= $2 AND position < $3`
	return n, r.list(ctx, "groups", query, []any{r.id, from, end}, func(scan func(...any) error) error { return scan(&n) })
}

// End implements ledger.Reader.
func (r *reader) End(ctx context.Context) (end uint64, err error) {
	query := `SELECT position + 1 FROM prompt_group WHERE ledger = $1 ORDER BY position DESC LIMIT 1`
	return end, r.list(ctx, "groups", query, []any{r.id}, func(scan func(...any) error) error { return scan(&end) })
}

// Weights implements ledger.Reader.
func (r *reader) Weights(ctx context.Context, versions []uint64) (out []ledger.Weights, err error) {
	err = r.list(ctx, "weights", r.sql.weights, []any{r.id, set(versions)}, func(scan func(...any) error) error {
		var w ledger.Weights
		err := scan(&w.Version, &w.Lineage, &w.Digest, &w.Retrained)
		out = append(out, w)
		return err
	})
	return out, err
}

// Lineages implements ledger.Reader.
func (r *reader) Lineages(ctx context.Context) (out []ledger.Lineage, err error) {
	query := `SELECT lineage, first_version, step, old_lineage FROM lineage WHERE ledger = $1 ORDER BY lineage`
	err = r.list(ctx, "lineages", query, []any{r.id}, func(scan func(...any) error) error {
		var l ledger.Lineage
		err := scan(&l.Number, &l.First, &l.Step, &l.Old)
		out = append(out, l)
		return err
	})
	return out, err
}

// ListWeights implements ledger.Reader.
func (r *reader) ListWeights(ctx context.Context, from uint64, limit int) (out []ledger.Weights, err error) {
	query := `SELECT version, lineage, digest, retrained FROM weights WHERE ledger = $1 AND version IN
		(SELECT DISTINCT version FROM weights WHERE ledger = $1 AND version >= $2 ORDER BY version LIMIT $3) ORDER BY version, lineage`
	err = r.list(ctx, "weights", query, []any{r.id, from, limit}, func(scan func(...any) error) error {
		var w ledger.Weights
		err := scan(&w.Version, &w.Lineage, &w.Digest, &w.Retrained)
		out = append(out, w)
		return err
	})
	return out, err
}

// Segments implements ledger.Reader.
func (r *reader) Segments(ctx context.Context) (out []ledger.Segment, err error) {
	query := `SELECT number, bytes, trimmed FROM segment WHERE ledger = $1 ORDER BY number`
	err = r.list(ctx, "segments", query, []any{r.id}, func(scan func(...any) error) error {
		var s ledger.Segment
		err := scan(&s.Number, &s.Bytes, &s.Trimmed)
		out = append(out, s)
		return err
	})
	return out, err
}

// Uncovered implements ledger.Reader.
func (r *reader) Uncovered(ctx context.Context, through uint64) (map[uint32]bool, error) {
	out := map[uint32]bool{}
	query := `SELECT DISTINCT s.segment FROM (
			SELECT position FROM prompt_group WHERE ledger = $1 AND step > 0 AND step > $2
			UNION SELECT position FROM prompt_group WHERE ledger = $1 AND state IN (1, 2, 3, 6)
		) g ` + r.sql.join + ` sample s ON s.ledger = $1 AND s.position = g.position`
	err := r.list(ctx, "uncovered segments", query, []any{r.id, through}, func(scan func(...any) error) error {
		var number uint32
		err := scan(&number)
		out[number] = true
		return err
	})
	return out, err
}
