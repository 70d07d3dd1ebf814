package sqldb

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
)

// Dialect returns the SQL fragments in which SQLite and PostgreSQL differ.
type Dialect struct{ postgresql bool }

// Postgres reports whether this is PostgreSQL.
func (d Dialect) Postgres() bool { return d.postgresql }

// choose returns the fragment of the database in use.
func (d Dialect) choose(sqlite, postgres string) string {
	if d.Postgres() {
		return postgres
	}
	return sqlite
}

// ForUpdate is the suffix of a SELECT that locks the selected rows until the transaction ends.
// SQLite needs none, because it runs one write transaction at a time.
func (d Dialect) ForUpdate() string { return d.choose("", " FOR UPDATE") }

// Among returns the right side of a condition that matches any number in parameter n, a JSON list
// such as "[1,2]".
func (d Dialect) Among(n int) string {
	return d.choose(fmt.Sprintf("IN (SELECT value FROM json_each($%d))", n),
		fmt.Sprintf("IN (SELECT value::bigint FROM json_array_elements_text($%d::json))", n))
}

// AmongTexts is Among for a JSON list of texts.
func (d Dialect) AmongTexts(n int) string {
	return d.choose(fmt.Sprintf("IN (SELECT value FROM json_each($%d))", n),
		fmt.Sprintf("IN (SELECT value FROM json_array_elements_text($%d::json))", n))
}

// Rows is a VALUES list of n rows, with parameters in order and the given number of columns. SQLite
// gets unnumbered parameters, because it searches the whole list for each numbered one, which for
// 64 samples took as long as writing them.
func (d Dialect) Rows(n, columns int) string {
	rows := make([]string, n)
	row := make([]string, columns)
	for i := range rows {
		for j := range row {
			row[j] = d.choose("?", fmt.Sprintf("$%d", i*columns+j+1))
		}
		rows[i] = "(" + strings.Join(row, ", ") + ")"
	}
	return strings.Join(rows, ", ")
}

// Indexed follows a table name and makes SQLite use the index. PostgreSQL chooses by its
// statistics.
func (d Dialect) Indexed(index string) string { return d.choose(" INDEXED BY "+index, "") }

// JoinInOrder is a JOIN that SQLite runs in the written order.
func (d Dialect) JoinInOrder() string { return d.choose("CROSS JOIN", "JOIN") }

// LockTable locks a table against other transactions that call it, until this one ends, so that
// rows become visible in the order of their identity. SQLite always runs write transactions one by
// one.
func (d Dialect) LockTable(ctx context.Context, tx *sql.Tx, table string) error {
	if !d.Postgres() {
		return nil
	}
	if _, err := tx.ExecContext(ctx, "LOCK TABLE "+table+" IN SHARE ROW EXCLUSIVE MODE"); err != nil {
		return fmt.Errorf("lock table %s: %w", table, err)
	}
	return nil
}

// Text replaces NUL characters in text from outside, because PostgreSQL refuses a transaction that
// stores them.
func Text(s string) string { return strings.ReplaceAll(s, "\x00", "\uFFFD") }
