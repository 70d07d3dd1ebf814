package input

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// reporter reports the problems of a dataset. It lists some problems of each kind and counts
// others.
type reporter struct {
	path     string // of the dataset in messages
	table    string // see Dataset.Table
	number   uint64 // of the current row, from 1
	column   string // field of the problem that is reported; "" for the whole row
	problems *problem.List
	shown    map[string]int    // reported problems by kind
	hidden   map[string]uint64 // other problems by kind
}

// lacks reports an absent field and lists the existing ones.
func (r *reporter) lacks(line []byte, fields map[string]json.RawMessage, field, path, key string) {
	names := make([]string, 0, len(fields))
	for name := range fields {
		names = append(names, name)
	}
	slices.Sort(names)
	fix := fmt.Sprintf("add it, or set `%s` in [data]", key)
	if len(names) > 0 {
		fix += "; the row has `" + strings.Join(names, "`, `") + "`"
	}
	r.bad("lacks "+field, line, -1, path, fmt.Sprintf("the row has no `%s`", field), fix)
}

func (r *reporter) badField(kind string, line []byte, field, message, fix string) {
	key, _ := json.Marshal(field)
	r.column = field
	r.bad(kind, line, bytes.Index(line, key), "", message, fix)
	r.column = ""
}

// bad reports a problem of the current row. at is the byte at which it starts, -1 for the whole
// row.
func (r *reporter) bad(kind string, line []byte, at int, field, message, fix string) {
	if r.shown[kind] >= sameShown {
		r.hidden[kind]++
		return
	}
	r.shown[kind]++
	r.report(line, at, field, message, fix)
}

// report adds a problem of the current row, without a limit per kind.
func (r *reporter) report(line []byte, at int, field, message, fix string) {
	p := &planv1.Problem{Reason: problem.BadRow, File: r.path, Line: uint32(r.number), Column: 1, Message: message, Fix: fix, Field: field}
	if r.table != "" {
		p.Line, p.Column, p.Excerpt = inCSV(r.table, r.number, r.column)
		r.problems.Add(p)
		return
	}
	if at >= 0 && at <= len(line) {
		p.Column = uint32(utf8.RuneCount(line[:at]) + 1)
		p.Text = strings.ToValidUTF8(wordAt(line, at), "\uFFFD")
	}
	p.Excerpt = strings.ToValidUTF8(string(line[:min(len(line), maxExcerpt)]), "\uFFFD")
	r.problems.Add(p)
}

// summary reports the number of problems that were not listed, and a file without rows.
func (r *reporter) summary() {
	if r.number == 0 {
		r.problems.Add(&planv1.Problem{
			Reason: problem.BadRow, File: r.path, Message: "the file is empty", Fix: "write one JSON object per line, such as {\"prompt\": \"17+25=\", \"answer\": \"42\"}",
		})
	}
	kinds := make([]string, 0, len(r.hidden))
	for kind := range r.hidden {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	total := uint64(0)
	for _, kind := range kinds {
		total += r.hidden[kind]
	}
	if total > 0 {
		r.problems.Add(&planv1.Problem{
			Reason: problem.BadRow, File: r.path, Line: uint32(r.number),
			Message: fmt.Sprintf("and %d more problems of the same kinds", total), Fix: "correct those above first",
		})
	}
}

func jsonKind(raw json.RawMessage) string {
	switch raw[0] {
	case '"':
		return "a string"
	case '{':
		return "an object"
	case '[':
		return "a list"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return "a number"
}

func article(kind string) string {
	switch kind {
	case "array":
		return "a list"
	case "bool":
		return "a boolean"
	}
	return "a " + kind
}
