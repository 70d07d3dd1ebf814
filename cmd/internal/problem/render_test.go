package problem

import (
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

func TestRender(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		problem *planv1.Problem
		want    string
	}{
		"no place": {&planv1.Problem{Message: "no Python"}, "no Python\n"},
		"file":     {&planv1.Problem{File: "a.jsonl", Message: "it is empty", Fix: "fill it"}, "a.jsonl: it is empty\n   fix: fill it\n"},
		"tab": {
			&planv1.Problem{File: "a", Line: 7, Column: 2, Message: "m", Text: "grp", Excerpt: "\tgrp = 8"},
			"a:7:2: m\n    7 |     grp = 8\n            ^^^\n",
		},
		"wide characters": {
			&planv1.Problem{File: "a", Line: 7, Column: 5, Message: "m", Text: "本", Excerpt: "日 = 本 # x"},
			"a:7:5: m\n    7 | 日 = 本 # x\n             ^^\n",
		},
		"whole line":   {&planv1.Problem{File: "a", Line: 7, Column: 1, Message: "m", Excerpt: "{}"}, "a:7:1: m\n    7 | {}\n"},
		"end of line":  {&planv1.Problem{File: "a", Line: 7, Column: 3, Message: "m", Excerpt: "{}"}, "a:7:3: m\n    7 | {}\n          ^\n"},
		"beyond it":    {&planv1.Problem{File: "a", Line: 7, Column: 90, Message: "m", Text: "xyz", Excerpt: "{}"}, "a:7:90: m\n    7 | {}\n          ^\n"},
		"control code": {&planv1.Problem{File: "a", Line: 7, Column: 1, Message: "m", Excerpt: "\x1b[2Jx"}, "a:7:1: m\n    7 | \uFFFD[2Jx\n"},
	} {
		if diff := cmp.Diff(c.want+"1 problem\n", Render([]*planv1.Problem{c.problem}, output.Style{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if got := Render(nil, output.Style{}); got != "" {
		t.Errorf("nothing: %q", got)
	}
}

func TestALongLineIsCutAroundItsPlace(t *testing.T) {
	t.Parallel()
	line := strings.Repeat("a", 1000) + `"here"` + strings.Repeat("b", 1000)
	got := Render([]*planv1.Problem{{File: "f", Line: 1, Column: 1001, Text: `"here"`, Message: "m", Excerpt: line}}, output.Style{})
	lines := strings.Split(got, "\n")
	if ansi.StringWidth(lines[1]) > maxWidth+10 {
		t.Errorf("%d columns", ansi.StringWidth(lines[1]))
	}
	at := strings.Index(lines[2], "^")
	if marked := string([]rune(lines[1])[at : at+6]); marked != `"here"` || strings.Count(lines[2], "^") != 6 {
		t.Errorf("marked %q in\n%s", marked, got)
	}
}

func TestColor(t *testing.T) {
	t.Parallel()
	problem := []*planv1.Problem{{File: "a", Line: 7, Column: 2, Message: "m", Text: "b", Excerpt: " b", Fix: "x"}}
	got := Render(problem, output.Style{Color: true})
	if !strings.Contains(got, "\x1b[31mm\x1b[0m") || ansi.Strip(got) != Render(problem, output.Style{}) {
		t.Errorf("%q", got)
	}
}
