// Package problem collects what is wrong with a configuration and its inputs, in the order of the files.
package problem

import (
	"cmp"
	"slices"
	"unicode/utf8"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/document"
)

// Reasons, machine-readable and stable. Those of a reward are the reasons of Python's `rollout.plugin`.
const (
	Syntax         = "SYNTAX"           // the text is no TOML, JSON or Python
	UnknownKey     = "UNKNOWN_KEY"      // no such key or table
	DuplicateKey   = "DUPLICATE_KEY"    // a key or table is set twice
	WrongType      = "WRONG_TYPE"       // a value of another type
	OutOfRange     = "OUT_OF_RANGE"     // a number beyond its limits
	BadValue       = "BAD_VALUE"        // a text that is none of those allowed
	MissingKey     = "MISSING_KEY"      // a required key or table is absent
	Conflict       = "CONFLICT"         // two settings exclude each other
	MissingFile    = "MISSING_FILE"     // a file or folder is absent or unreadable
	BadRow         = "BAD_ROW"          // a row of a dataset can't be used
	BadModel       = "BAD_MODEL"        // a model folder can't be used
	ContextTooLong = "CONTEXT_TOO_LONG" // a prompt leaves no room for its completion
	Probe          = "PROBE_FAILED"     // the Python probe itself could not run
	BadPlan        = "BAD_PLAN"         // a plan file is damaged
	PlanFormat     = "PLAN_FORMAT"      // a plan has another format
	InputChanged   = "INPUT_CHANGED"    // an input is another one than the plan pins
	PackageMissing = "PACKAGE_MISSING"  // a package that the workers need is not installed
	PackageChanged = "PACKAGE_CHANGED"  // a package is of another version than the plan pins
)

// maxExcerpt is the most characters of a line that travel with a problem.
const maxExcerpt = 4096

// List is a growing list. The zero value is empty.
type List struct{ items []*planv1.Problem }

// Add appends a problem.
func (l *List) Add(p *planv1.Problem) { l.items = append(l.items, p) }

// At appends a problem that stands in a text.
func (l *List) At(span document.Span, reason, field, message, fix string) {
	p := &planv1.Problem{Reason: reason, Field: field, Message: message, Fix: fix}
	if span.Valid() {
		line, column := span.Position()
		p.File, p.Line, p.Column = span.Source.Name, uint32(line), uint32(column)
		p.Text = span.Text()
		if p.Text != "" {
			p.Excerpt = Excerpt(span.Line())
		}
	}
	l.Add(p)
}

// Len is how many there are.
func (l *List) Len() int { return len(l.items) }

// Empty reports whether nothing is wrong.
func (l *List) Empty() bool { return len(l.items) == 0 }

// Sorted returns the problems: those of the files in the order of first, then other files as they came; within a file by
// line and column.
func (l *List) Sorted(first ...string) []*planv1.Problem {
	rank := map[string]int{}
	for _, file := range first {
		rank[file] = len(rank)
	}
	for _, p := range l.items {
		if _, ok := rank[p.GetFile()]; !ok {
			rank[p.GetFile()] = len(rank)
		}
	}
	out := slices.Clone(l.items)
	slices.SortStableFunc(out, func(a, b *planv1.Problem) int {
		return cmp.Or(
			cmp.Compare(rank[a.GetFile()], rank[b.GetFile()]),
			cmp.Compare(a.GetLine(), b.GetLine()),
			cmp.Compare(a.GetColumn(), b.GetColumn()),
		)
	})
	return out
}

// Excerpt cuts a line to what travels with a problem.
func Excerpt(line string) string {
	if utf8.RuneCountInString(line) <= maxExcerpt {
		return line
	}
	return string([]rune(line)[:maxExcerpt])
}
