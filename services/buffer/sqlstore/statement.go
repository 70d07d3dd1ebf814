package sqlstore

import (
	"context"
	"database/sql"
	"strings"

	"github.com/rollout-rl/rollout/libs/sqldb"
)

// statements are the SQL texts of one dialect. Those of a step are prepared if the driver does not
// do it: parsing took a third of a transaction of 8 samples.
type statements struct {
	ledger, lock, groups, samples, batch, taken, pending, step, weights string
	save, verify, take, putSegment, markTrimmed, forget                 string
	join                                                                string // keeps the order in which it is written
	live                                                                string // prompt_group, read by the index of groups that a step may still take

	putGroups, addSamples map[int]string // by the number of rows
	prepared              map[string]*sqldb.Prepared
}

const (
	groupColumns  = `position, attempt, state, reason, step, samples, pending, failures, min_version, arrival, token_rewards`
	sampleColumns = `s.position, s.sample, s.part, s.attempt, s.segment, s.byte_offset, s.byte_length, s.crc32c, s.ref, s.reward,
	s.outcome, s.min_version, s.receipt_version, s.receipt_digest, s.times`
	stepColumns = `step, batch, group_count, sample_count, excluded_count, weights_digest, chain, zero_count, zero_reward, end_position, lineage`
	sampleOrder = ` ORDER BY s.position, s.sample, s.part`
)

// newStatements makes the texts. Joins are written in the order in which they must run, and SQLite
// gets the index by name: its planner does not know that a step is small and a ledger large.
func newStatements(db *sqldb.DB) *statements {
	ledger := `SELECT id, config, closed, revision, step, chain, arrivals, trimmed, weights_version, weights_digest,
		open, ready, leased, consumed, excluded, dissolved, samples, duplicates, refused, infra_failed, skipped, failures, lineage FROM ledger WHERE run = $1`
	st := &statements{
		putGroups: map[int]string{}, addSamples: map[int]string{},
		ledger: ledger,
		lock:   ledger + db.ForUpdate(),
		groups: `SELECT ` + groupColumns + ` FROM prompt_group WHERE ledger = $1 AND position ` + db.Among(2),
		samples: `SELECT ` + sampleColumns + ` FROM sample s
		WHERE s.ledger = $1 AND s.position ` + db.Among(2) + sampleOrder,
		batch: `SELECT ` + sampleColumns + ` FROM prompt_group g` + db.Indexed("prompt_group_step") + `
		` + db.JoinInOrder() + ` sample s ON s.ledger = g.ledger AND s.position = g.position
		WHERE g.ledger = $1 AND g.step = $2 AND g.step > 0 AND g.state IN (3, 4)` + sampleOrder,
		taken: `SELECT ` + groupColumns + ` FROM prompt_group` + db.Indexed("prompt_group_step") + `
		WHERE ledger = $1 AND step = $2 AND step > 0 ORDER BY position`,
		pending: `SELECT ` + sampleColumns + ` FROM sample s` + db.Indexed("sample_pending") + `
		WHERE s.ledger = $1 AND s.receipt_version = $2 AND s.receipt_digest IS NOT NULL` + sampleOrder,
		step:    `SELECT ` + stepColumns + ` FROM step WHERE ledger = $1 AND step = $2`,
		weights: `SELECT version, lineage, digest, retrained FROM weights WHERE ledger = $1 AND version ` + db.Among(2) + ` ORDER BY version, lineage`,
		save: `UPDATE ledger SET closed = $1, revision = $2, step = $3, chain = $4, arrivals = $5, trimmed = $6,
		weights_version = $7, weights_digest = $8, open = $9, ready = $10, leased = $11, consumed = $12, excluded = $13, dissolved = $14,
		samples = $15, duplicates = $16, refused = $17, infra_failed = $18, skipped = $19, failures = $20, lineage = $21 WHERE id = $22`,
		verify: `UPDATE sample` + db.Indexed("sample_pending") + ` SET receipt_digest = NULL
		WHERE ledger = $1 AND receipt_version = $2 AND receipt_digest IS NOT NULL`,
		take: `UPDATE prompt_group` + db.Indexed("prompt_group_step") + ` SET state = $4 WHERE ledger = $1 AND step = $2 AND step > 0 AND state = $3`,
		putSegment: `INSERT INTO segment (ledger, number, bytes, trimmed) VALUES ($1, $2, $3, $4)
		ON CONFLICT (ledger, number) DO UPDATE SET bytes = excluded.bytes, trimmed = excluded.trimmed`,
		markTrimmed: `INSERT INTO unused_payload (ledger, ref)
		SELECT DISTINCT s.ledger, s.ref FROM prompt_group g` + db.Indexed("prompt_group_step") + `
		` + db.JoinInOrder() + ` sample s ON s.ledger = g.ledger AND s.position = g.position AND s.ref <> ''
		WHERE g.ledger = $1 AND g.step > 0 AND g.step > $2 AND g.step <= $3 ON CONFLICT DO NOTHING`,
		forget: `DELETE FROM unused_payload WHERE ledger = $1 AND ref ` + db.AmongTexts(2),
		join:   db.JoinInOrder(),
		live:   `prompt_group` + db.Indexed("prompt_group_live"),
	}
	for _, n := range chunks {
		st.putGroups[n], st.addSamples[n] = putGroups(db, n), addSamples(db, n)
	}
	return st
}

// prepare parses the statements of a step when the store opens, because the single writing
// connection is in use within a transaction. Other statements are parsed when they run.
func (st *statements) prepare(ctx context.Context, db *sqldb.DB) error {
	st.prepared = map[string]*sqldb.Prepared{}
	texts := []string{st.lock, st.groups, st.samples, st.batch, st.pending, st.step, st.weights, st.save, st.putSegment}
	for _, n := range chunks {
		texts = append(texts, st.putGroups[n], st.addSamples[n])
	}
	for _, text := range texts {
		p, err := db.Prepare(ctx, text)
		if err != nil {
			return err
		}
		if p != nil {
			st.prepared[text] = p
		}
	}
	return nil
}

// query is tx.QueryContext.
func (r *reader) query(ctx context.Context, text string, args ...any) (*sql.Rows, error) {
	if p := r.sql.prepared[text]; p != nil {
		return r.tx.StmtContext(ctx, p.In(r.writes)).QueryContext(ctx, args...) //nolint:sqlclosecheck // closed with the transaction
	}
	return r.tx.QueryContext(ctx, text, args...)
}

// exec is tx.ExecContext.
func (r *reader) exec(ctx context.Context, text string, args ...any) (sql.Result, error) {
	if p := r.sql.prepared[text]; p != nil {
		// The transaction itself ends with ctx. If statements had it too, SQLite's driver would
		// start a goroutine for each.
		ctx = context.WithoutCancel(ctx)
		return r.tx.StmtContext(ctx, p.In(r.writes)).ExecContext(ctx, args...) //nolint:sqlclosecheck // closed with the transaction
	}
	return r.tx.ExecContext(ctx, text, args...)
}

// chunks are the numbers of rows that one statement writes: few, so that each text is prepared
// once, and large, so that there are few round trips.
var chunks = []int{64, 32, 16, 8, 4, 2, 1}

func putGroups(db *sqldb.DB, n int) string {
	return `INSERT INTO prompt_group (ledger, ` + groupColumns + `) VALUES ` + db.Rows(n, 12) + `
		ON CONFLICT (ledger, position) DO UPDATE SET attempt = excluded.attempt, state = excluded.state, reason = excluded.reason,
			step = excluded.step, samples = excluded.samples, pending = excluded.pending, failures = excluded.failures,
			min_version = excluded.min_version, arrival = excluded.arrival, token_rewards = excluded.token_rewards`
}

func addSamples(db *sqldb.DB, n int) string {
	return `INSERT INTO sample (ledger, ` + strings.ReplaceAll(sampleColumns, "s.", "") + `) VALUES ` + db.Rows(n, 16)
}
