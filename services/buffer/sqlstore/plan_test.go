package sqlstore

import (
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/sqldb"
)

// A ledger grows with its run, so no statement of a step may read all of it. The test checks the
// plan of each.
func TestNoStatementOfAStepScansTheLedger(t *testing.T) {
	t.Parallel()
	s, err := Open(t.Context(), sqldb.Files(t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const (
		groups  = `SELECT * FROM prompt_group WHERE ledger = 1 AND `
		samples = `SELECT * FROM sample s WHERE s.ledger = 1 AND `
		some    = `position IN (SELECT value FROM json_each('[1]'))`
	)
	for _, c := range []struct{ statement, index string }{
		{groups + some, "PRIMARY KEY (ledger=? AND position=?)"},
		{groups + `position >= 5 AND position < 9 ORDER BY position `, "PRIMARY KEY (ledger=? AND position>? AND position<?)"},
		{`SELECT * FROM ` + s.sql.live + ` WHERE ledger = 1 AND position >= 0 AND state = 6 AND state IN (1, 2, 3, 6) ORDER BY position `, "prompt_group_live (ledger=? AND state=? AND position>?)"},
		{groups + `arrival > 0 AND step = 0 ORDER BY arrival LIMIT 3`, "prompt_group_arrival (ledger=? AND arrival>?)"},
		{samples + some + ` ORDER BY s.position, s.sample, s.part`, "PRIMARY KEY (ledger=? AND position=?)"},
		{s.sql.take, "prompt_group_step (ledger=? AND step=?)"},
		{s.sql.taken, "prompt_group_step (ledger=? AND step=?)"},
		{s.sql.verify, "sample_pending (ledger=? AND receipt_version=?)"},
		{s.sql.pending, "sample_pending (ledger=? AND receipt_version=?)"},
		{s.sql.batch, "prompt_group_step (ledger=? AND step=?)"},
	} {
		plan := explain(t, s, c.statement)
		if !strings.Contains(plan, c.index) || strings.Contains(strings.ReplaceAll(plan, "SCAN json_each", ""), "SCAN") {
			t.Errorf("%s\nis planned as\n%s\nwant %s and no scan", c.statement, plan, c.index)
		}
	}
}

func explain(t *testing.T, s *Store, statement string) string {
	t.Helper()
	args := []any{1, 2, 3, 4}[:strings.Count(statement, "$")]
	var lines []string
	err := s.db.Each(t.Context(), "EXPLAIN QUERY PLAN "+statement, args, func(scan sqldb.Scan) error {
		var id, parent, unused int
		var detail string
		err := scan(&id, &parent, &unused, &detail)
		lines = append(lines, detail)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}
