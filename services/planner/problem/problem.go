// Package problem collects the problems of a configuration and its inputs, in the order of the
// files.
package problem

import (
	"cmp"
	"slices"
	"unicode/utf8"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/document"
)

// Reasons, machine-readable and stable. The reasons of rewards are those of `rollout.plugin` in
// Python.
const (
	Syntax         = "SYNTAX"           // the text is not TOML, JSON, or Python
	UnknownKey     = "UNKNOWN_KEY"      // no such key or table
	DuplicateKey   = "DUPLICATE_KEY"    // a key or table is set twice
	WrongType      = "WRONG_TYPE"       // a value of another type
	OutOfRange     = "OUT_OF_RANGE"     // a number outside of its range
	BadValue       = "BAD_VALUE"        // a string that is not allowed
	MissingKey     = "MISSING_KEY"      // a required key or table is absent
	Conflict       = "CONFLICT"         // two settings exclude each other
	MissingFile    = "MISSING_FILE"     // a file or folder is absent or unreadable
	BadRow         = "BAD_ROW"          // a row of a dataset can't be used
	BadModel       = "BAD_MODEL"        // a model folder can't be used
	ContextTooLong = "CONTEXT_TOO_LONG" // a prompt leaves no room for its completion
	Probe          = "PROBE_FAILED"     // the Python probe itself could not run
	UnusualValue   = "UNUSUAL_VALUE"    // a warning: a number far from what works for others
	TooLarge       = "TOO_LARGE"        // the run needs more memory than the host has
	ConstantReward = "CONSTANT_REWARD"  // a warning: all samples of the dry call have the same reward
	BadPlan        = "BAD_PLAN"         // a plan file is damaged
	PlanFormat     = "PLAN_FORMAT"      // a plan has another format
	InputChanged   = "INPUT_CHANGED"    // an input differs from the plan
	PackageMissing = "PACKAGE_MISSING"  // a package that the workers need is not installed
	PackageChanged = "PACKAGE_CHANGED"  // the version of a package differs from the plan
	PluginChanged  = "PLUGIN_CHANGED"   // the installed package of a plugin differs from the plan
)

// maxExcerpt is the length of an excerpt in characters.
const maxExcerpt = 4096

// List is a growing list. The zero value is empty.
type List struct{ items []*planv1.Problem }

// Add appends a problem.
func (l *List) Add(p *planv1.Problem) { l.items = append(l.items, p) }

// At appends a problem at a place in a text.
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

// Len is the number of problems.
func (l *List) Len() int { return len(l.items) }

// Empty reports whether there are no problems.
func (l *List) Empty() bool { return len(l.items) == 0 }

// Sorted returns the problems: those of the files in the order of first, then other files as they
// came; within a file by line and column.
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
