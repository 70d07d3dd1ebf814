// Package problem prints problems of a configuration and its inputs, like a compiler:
//
//	grpo.toml:12:1: unknown key `grp_size` in [sampling]
//	   12 | grp_size = 8
//	        ^^^^^^^^
//	   fix: did you mean `group_size`?
package problem

import (
	"fmt"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

const (
	tabWidth = 4
	maxWidth = 120 // columns of an excerpt; a longer line is cut around the marked text
	before   = 60  // columns shown before the marked text of a cut line
)

// Render returns the text of all problems, with a count at the end.
func Render(problems []*planv1.Problem, s output.Style) string {
	var b strings.Builder
	for _, p := range problems {
		one(&b, p, s)
	}
	if n := len(problems); n == 1 {
		b.WriteString("1 problem\n")
	} else if n > 1 {
		fmt.Fprintf(&b, "%d problems\n", n)
	}
	return b.String()
}

// Exit returns the error of a command that has printed problems: nil without problems, exit.NoInput
// where every problem is a missing file, else exit.Data.
func Exit(problems []*planv1.Problem) error {
	if len(problems) == 0 {
		return nil
	}
	for _, p := range problems {
		if p.GetReason() != "MISSING_FILE" {
			return exit.Silent(exit.Data)
		}
	}
	return exit.Silent(exit.NoInput)
}

func one(b *strings.Builder, p *planv1.Problem, s output.Style) {
	if place := Place(p); place != "" {
		b.WriteString(s.Bold(place + ":"))
		b.WriteByte(' ')
	}
	b.WriteString(s.Red(p.GetMessage()))
	b.WriteByte('\n')
	if p.GetExcerpt() != "" {
		excerpt(b, p, s)
	}
	if p.GetFix() != "" {
		fmt.Fprintf(b, "   %s %s\n", s.Cyan("fix:"), p.GetFix())
	}
}

// Place returns `file:line:column`, as far as it is known.
func Place(p *planv1.Problem) string {
	place := p.GetFile()
	if p.GetLine() > 0 && place != "" {
		place += fmt.Sprintf(":%d", p.GetLine())
		if p.GetColumn() > 0 {
			place += fmt.Sprintf(":%d", p.GetColumn())
		}
	}
	return place
}

// excerpt prints the line and marks the text in it.
func excerpt(b *strings.Builder, p *planv1.Problem, s output.Style) {
	runes := []rune(p.GetExcerpt())
	start := min(max(int(p.GetColumn())-1, 0), len(runes))
	end := min(start+len([]rune(p.GetText())), len(runes))
	left, marked, right := expand(runes[:start]), expand(runes[start:end]), expand(runes[end:])
	if lead := ansi.StringWidth(left); lead+ansi.StringWidth(marked+right) > maxWidth {
		if lead > before {
			left = "…" + ansi.TruncateLeft(left, lead-before, "")
		}
		line := ansi.Truncate(left+marked+right, maxWidth, "…")
		marked, right = "", strings.TrimPrefix(line, left)
		if mark := expand(runes[start:end]); strings.HasPrefix(right, mark) {
			marked, right = mark, strings.TrimPrefix(right, mark)
		}
	}
	gutter := fmt.Sprintf("%5d | ", p.GetLine())
	fmt.Fprintf(b, "%s%s%s%s\n", s.Dim(gutter), left, marked, right)
	if p.GetText() == "" {
		if p.GetColumn() <= 1 {
			return // the whole line
		}
		fmt.Fprintf(b, "%s%s\n", strings.Repeat(" ", len(gutter)+ansi.StringWidth(left)), s.Yellow("^"))
		return
	}
	width := max(1, ansi.StringWidth(marked))
	fmt.Fprintf(b, "%s%s\n", strings.Repeat(" ", len(gutter)+ansi.StringWidth(left)), s.Yellow(strings.Repeat("^", width)))
}

// expand replaces tabs and control characters.
func expand(runes []rune) string {
	var b strings.Builder
	for _, r := range runes {
		switch {
		case r == '\t':
			b.WriteString(strings.Repeat(" ", tabWidth))
		case r < 0x20 || r == 0x7f:
			b.WriteRune('\uFFFD') // could be an escape sequence
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}
