package sqldbtest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/sqldb"
)

// Dump is every row of a service's SQLite file as text, to compare with a later one.
func Dump(t testing.TB, place sqldb.Files, service string) string {
	t.Helper()
	var lines []string
	each(t, place, service, func(table string, row []any) { lines = append(lines, fmt.Sprintln(table, row)) })
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// Rows is the number of rows of each table of a service's SQLite file that has any.
func Rows(t testing.TB, place sqldb.Files, service string) map[string]int {
	t.Helper()
	out := map[string]int{}
	each(t, place, service, func(table string, _ []any) { out[table]++ })
	return out
}

// each calls row with each row of each table.
func each(t testing.TB, place sqldb.Files, service string, row func(table string, values []any)) {
	t.Helper()
	db, err := place.Open(t.Context(), service, sqldb.Normal)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}()
	type table struct {
		name    string
		columns int
	}
	var tables []table
	err = db.Each(t.Context(), `SELECT m.name, count(*) FROM sqlite_master m JOIN pragma_table_info(m.name) WHERE m.type = 'table' GROUP BY m.name ORDER BY m.name`, nil,
		func(scan sqldb.Scan) error {
			tables = append(tables, table{})
			last := &tables[len(tables)-1]
			return scan(&last.name, &last.columns)
		})
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range tables {
		err := db.Each(t.Context(), `SELECT * FROM `+of.name, nil, func(scan sqldb.Scan) error {
			values, places := make([]any, of.columns), make([]any, of.columns)
			for i := range values {
				places[i] = &values[i]
			}
			if err := scan(places...); err != nil {
				return err
			}
			row(of.name, values)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
