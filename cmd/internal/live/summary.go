package live

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const (
	answersShown = 5
	answerWidth  = 100
)

// Pair is one held-out row answered before and after.
type Pair struct{ Before, After Answer }

// Pairs are the rows that the first and the last evaluation both show, at most n.
func (r *Run) Pairs(n int) []Pair {
	if len(r.Evals) == 0 {
		return nil
	}
	first := map[uint64]Answer{}
	for _, answer := range r.Evals[0].Samples {
		first[answer.Row] = answer
	}
	var pairs []Pair
	for _, after := range r.Evals[len(r.Evals)-1].Samples {
		if before, ok := first[after.Row]; ok && len(pairs) < n {
			pairs = append(pairs, Pair{before, after})
		}
	}
	return pairs
}

// Paths are what a run leaves behind; empty ones are not shown.
type Paths struct {
	PNG  string `json:"png,omitempty"`
	HTML string `json:"html,omitempty"`
}

// Summary is what is said when a run is over.
func (r *Run) Summary(s output.Style, paths Paths) string {
	run := r.Status.GetRun()
	var b strings.Builder
	took := ""
	if run.GetEndTime() != nil {
		took = " in " + output.Duration(run.GetEndTime().AsTime().Sub(run.GetCreateTime().AsTime()).Round(100*time.Millisecond))
	}
	state := s.Red(State(run.GetState()))
	if run.GetState() == runv1.RunState_RUN_STATE_SUCCEEDED {
		state = s.Green(State(run.GetState()))
	}
	fmt.Fprintf(&b, "\n%s %s: %s after %s of %s steps%s\n", s.Bold(run.GetName()), run.GetRunId(), state,
		output.Count(r.CommittedSteps()), output.Count(run.GetTotalSteps()), took)
	if run.GetReason() != "" || run.GetMessage() != "" {
		fmt.Fprintf(&b, "   %s\n", s.Red(strings.TrimLeft(run.GetReason()+": ", ": ")+strings.ReplaceAll(run.GetMessage(), "\n", "\n   ")))
	}
	b.WriteString(r.leftOut(s))
	b.WriteString(r.comparison(s))
	b.WriteString(r.answers(s))
	b.WriteString(r.left(s, paths))
	return b.String()
}

// leftOut says which groups were never trained on though nobody wanted that.
func (r *Run) leftOut(s output.Style) string {
	if len(r.LeftOut) == 0 {
		return ""
	}
	counts := map[string]int{}
	for _, reason := range r.LeftOut {
		counts[reason]++
	}
	var reasons []string
	for _, reason := range slices.Sorted(maps.Keys(counts)) {
		reasons = append(reasons, fmt.Sprintf("%s %d", reason, counts[reason]))
	}
	what := "1 group is left out, each attempt at it failed"
	if n := len(r.LeftOut); n > 1 {
		what = fmt.Sprintf("%d groups are left out, each attempt at them failed", n)
	}
	return "   " + s.Red(fmt.Sprintf("%s: %s; see `rollout logs tail %s --level warn`", what, strings.Join(reasons, ", "), r.Status.GetRun().GetRunId())) + "\n"
}

// comparison is the table of measures before and after.
func (r *Run) comparison(s output.Style) string {
	if len(r.Evals) < 2 {
		return ""
	}
	first, last := r.Evals[0], r.Evals[len(r.Evals)-1]
	var table output.Table
	table.Row(s.Bold("held-out"), s.Bold("before"), s.Bold("after"), "")
	for _, name := range evalNames(last.Metrics) {
		before, ok := first.Metrics[name]
		if !ok {
			continue
		}
		change := last.Metrics[name] - before
		sign := s.Green
		if change < 0 != (name == "eval/loss") {
			sign = s.Red
		}
		table.Row(strings.TrimPrefix(name, "eval/"), output.Number(before), output.Number(last.Metrics[name]), sign(fmt.Sprintf("%+.3f", change)))
	}
	told := ""
	if failed := last.Metrics["eval/failed"]; failed > 0 {
		told = s.Red(fmt.Sprintf("the last one is over %.0f of %.0f answers: %.0f could not be scored and count for nothing\n",
			last.Metrics["eval/samples"]-failed, last.Metrics["eval/samples"], failed))
	}
	return "\n" + table.String() + told
}

func (r *Run) answers(s output.Style) string {
	pairs := r.Pairs(answersShown)
	if len(pairs) == 0 || len(r.Evals) < 2 {
		return ""
	}
	var b strings.Builder
	b.WriteString("\n" + s.Bold("answers, before and after") + "\n")
	var table output.Table
	for _, pair := range pairs {
		table.Row("  "+oneLine(pair.After.Question()), s.Dim(oneLine(pair.Before.Completion)), verdict(pair.Before, s),
			"->", s.Bold(oneLine(pair.After.Completion)), verdict(pair.After, s))
	}
	b.WriteString(table.String())
	return b.String()
}

func verdict(a Answer, s output.Style) string {
	text := "(" + a.Verdict() + ")"
	if a.Good() {
		return s.Green(text)
	}
	return s.Red(text)
}

// oneLine makes any text safe and short.
func oneLine(text string) string {
	clean := strings.Map(func(r rune) rune {
		if r < 0x20 || r == 0x7f {
			return ' '
		}
		return r
	}, text)
	return ansi.Truncate(strings.TrimSpace(clean), answerWidth/3, "…")
}

// left lists what the run leaves behind.
func (r *Run) left(s output.Style, paths Paths) string {
	run := r.Status.GetRun()
	var table output.Table
	add := func(name, value string) {
		if value != "" {
			table.Row(s.Dim(name), value)
		}
	}
	add("curve", paths.PNG)
	add("report", paths.HTML)
	if r.Snapshot != nil {
		add("snapshot", fmt.Sprintf("%s (step %d)", r.Snapshot.GetAttributes()["snapshot"], r.Snapshot.GetStep()))
	}
	add("weights", run.GetWeightsDirectory())
	add("digest", run.GetWeightsDigest())
	if run.GetDirectory() != "" {
		add("logs", run.GetDirectory()+"/workers")
	}
	add("events", "rollout logs tail "+run.GetRunId())
	switch run.GetState() {
	case runv1.RunState_RUN_STATE_CANCELLED, runv1.RunState_RUN_STATE_INTERRUPTED, runv1.RunState_RUN_STATE_FAILED:
		add("go on", s.Cyan("rollout run --resume "+run.GetRunId()))
	case runv1.RunState_RUN_STATE_PAUSED: // by a refused gradient
		add("change", s.Cyan("rollout run --config FILE --from "+run.GetRunId()))
		add("try again", s.Cyan("rollout runs resume "+run.GetRunId()))
		add("give up", s.Cyan("rollout runs cancel "+run.GetRunId()))
	}
	return "\n" + table.String()
}
