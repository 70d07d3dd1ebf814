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

// Pairs returns at most n rows whose answers are in both the first and the last evaluation.
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

// Paths are the files of a report; empty ones are not shown.
type Paths struct {
	PNG  string `json:"png,omitempty"`
	HTML string `json:"html,omitempty"`
}

// Summary describes a run that is over.
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
		paint := s.Red
		if run.GetState() == runv1.RunState_RUN_STATE_SUCCEEDED { // a gate has stopped it
			paint = s.Green
		}
		fmt.Fprintf(&b, "   %s\n", paint(strings.TrimLeft(run.GetReason()+": ", ": ")+strings.ReplaceAll(run.GetMessage(), "\n", "\n   ")))
	}
	b.WriteString(r.excluded(s))
	b.WriteString(r.comparison(s))
	b.WriteString(r.answers(s))
	b.WriteString(r.results(s, paths))
	return b.String()
}

// excluded lists groups that were excluded because of failures.
func (r *Run) excluded(s output.Style) string {
	if len(r.Excluded) == 0 {
		return ""
	}
	counts := map[string]int{}
	for _, reason := range r.Excluded {
		counts[reason]++
	}
	var reasons []string
	for _, reason := range slices.Sorted(maps.Keys(counts)) {
		reasons = append(reasons, fmt.Sprintf("%s %d", reason, counts[reason]))
	}
	what := "1 group was excluded because all its attempts failed"
	if n := len(r.Excluded); n > 1 {
		what = fmt.Sprintf("%d groups were excluded because all their attempts failed", n)
	}
	return "   " + s.Red(fmt.Sprintf("%s: %s; see `rollout logs tail %s --level warn`", what, strings.Join(reasons, ", "), r.Status.GetRun().GetRunId())) + "\n"
}

// comparison is the table of metrics of the first and the last evaluation.
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
	note := ""
	if failed := counted(last.Metrics, "failed"); failed > 0 {
		all := counted(last.Metrics, "samples")
		note = s.Red(fmt.Sprintf("the last evaluation is over %.0f of %.0f answers: %.0f could not be scored and are not counted\n",
			all-failed, all, failed))
	}
	return "\n" + table.String() + note
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

// oneLine replaces control characters and truncates text.
func oneLine(text string) string {
	clean := strings.Map(func(r rune) rune {
		if r < 0x20 || r == 0x7f {
			return ' '
		}
		return r
	}, text)
	return ansi.Truncate(strings.TrimSpace(clean), answerWidth/3, "…")
}

// results lists files of the run and commands to continue.
func (r *Run) results(s output.Style, paths Paths) string {
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
		add("resume", s.Cyan("rollout run --resume "+run.GetRunId()))
	case runv1.RunState_RUN_STATE_PAUSED: // by a rejected gradient, the health check, or a gate
		add("change", s.Cyan("rollout run --config FILE --from "+run.GetRunId()+" --continue"))
		add("retry", s.Cyan("rollout runs resume "+run.GetRunId()))
		add("cancel", s.Cyan("rollout runs cancel "+run.GetRunId()))
	}
	return "\n" + table.String()
}
