package live

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// Line formats an event, which must have been added, as lines of a log; "" if it is not shown.
// Repeated warnings are joined. An evaluation with failed rows is a warning too, on the line after
// its metrics.
func (r *Run) Line(e *eventv1.Event, s output.Style, zone *time.Location) string {
	lines := warnings(r.repeats.Due(e.GetTime().AsTime()))(s, zone)
	warns := e.GetLevel() >= eventv1.Level_LEVEL_WARN
	if line := r.line(e, s, zone); line != "" && !warns {
		lines = append(lines, line)
	} else if e.GetKind() == evalFinished {
		lines = append([]string{line}, lines...)
	}
	return strings.Join(lines, "\n")
}

// LastLines returns the warnings that are not printed yet, after the last event.
func (r *Run) LastLines(s output.Style, zone *time.Location) string {
	return strings.Join(warnings(r.repeats.Rest())(s, zone), "\n")
}

func warnings(list []*Warning, counts []uint64) func(output.Style, *time.Location) []string {
	return func(s output.Style, zone *time.Location) (lines []string) {
		for i, w := range list {
			lines = append(lines, warning(w.Event, counts[i], s, zone))
		}
		return lines
	}
}

func (r *Run) line(e *eventv1.Event, s output.Style, zone *time.Location) string {
	var text string
	switch e.GetKind() {
	case "step.committed":
		text = r.stepLine(e, s)
	case evalFinished:
		text = "eval after step " + output.Count(e.GetStep()) + "  " + evalText(e.GetMetrics(), s)
	case "gate.fired":
		text = s.Bold(e.GetMessage())
	case "snapshot.created":
		text = fmt.Sprintf("snapshot %s after step %s", e.GetAttributes()["snapshot"], output.Count(e.GetStep()))
		if bytes := e.GetMetrics()["bytes"]; bytes > 0 {
			text += "  " + output.Bytes(uint64(bytes))
		}
	case "run.state":
		text = "run is " + s.Bold(e.GetAttributes()["state"])
		if reason := e.GetAttributes()["reason"]; reason != "" {
			text += ": " + reason
		}
	case "worker.started":
		text = fmt.Sprintf("worker %s started (pid %s)", e.GetAttributes()["worker"], e.GetAttributes()["pid"])
	case "worker.exited":
		text = fmt.Sprintf("worker %s exited with code %s", e.GetAttributes()["worker"], e.GetAttributes()["exit_code"])
	case "group.excluded":
		text = fmt.Sprintf("group %s is excluded: %s", e.GetAttributes()["group"], e.GetAttributes()["reason"])
	default:
		return ""
	}
	return s.Dim(clock(e.GetTime().AsTime(), zone)) + " " + text
}

func (r *Run) stepLine(e *eventv1.Event, s output.Style) string {
	m := e.GetMetrics()
	parts := []string{fmt.Sprintf("step %s/%s", output.Count(e.GetStep()), output.Count(r.Status.GetRun().GetTotalSteps()))}
	add := func(name, label string) {
		if v, ok := m[name]; ok {
			parts = append(parts, label+" "+output.Number(v))
		}
	}
	if v, ok := m["reward/mean"]; ok && !r.Supervised() {
		parts = append(parts, "reward "+s.Bold(output.Number(v)))
	}
	add("loss", "loss")
	for _, name := range preferenceNames {
		if v, ok := m[name]; ok {
			parts = append(parts, strings.TrimPrefix(name, "rewards/")+" "+preference(v))
		}
	}
	add("entropy", "entropy")
	add("grad_norm", "grad norm")
	if v := m["samples_per_second"]; v > 0 {
		parts = append(parts, output.Count(v)+" samples/s")
	}
	if v := m["tokens_per_second"]; v > 0 {
		parts = append(parts, output.Count(v)+" tokens/s")
	}
	if v := m["time/step"]; v > 0 {
		parts = append(parts, seconds(v))
	}
	return strings.Join(parts, "  ")
}

// preference formats a metric, with rounding errors shown as 0: at the first step the policy equals
// its reference.
func preference(v float64) string {
	if math.Abs(v) < 1e-6 {
		v = 0
	}
	return output.Number(v)
}

// preferenceNames are the metrics of training on preferences.
var preferenceNames = []string{"rewards/accuracy", "rewards/margin"}

// evalText lists the metrics of an evaluation: main metrics first, counts last.
func evalText(metrics map[string]float64, s output.Style) string {
	var parts []string
	for _, name := range evalNames(metrics) {
		parts = append(parts, strings.TrimPrefix(name, "eval/")+" "+s.Bold(output.Number(metrics[name])))
		if spread, ok := metrics[name+"_stderr"]; ok {
			parts[len(parts)-1] += " ± " + output.Number(spread)
		}
	}
	if n := counted(metrics, "samples"); n > 0 {
		parts = append(parts, fmt.Sprintf("(%s samples)", output.Count(n)))
	}
	if n := counted(metrics, "failed"); n > 0 {
		parts = append(parts, s.Yellow(fmt.Sprintf("(%s failed)", output.Count(n))))
	}
	return strings.Join(parts, "  ")
}

// counted sums a count of an evaluation, `samples` or `failed`, over the held-out rows and suites.
func counted(metrics map[string]float64, count string) (sum float64) {
	for name, n := range metrics {
		if strings.HasPrefix(name, "eval/") && strings.HasSuffix(name, "/"+count) {
			sum += n
		}
	}
	return sum
}

// IsEvalName reports whether a metric is a result of evaluations: not a count of samples, and not
// the standard error of another one.
func IsEvalName(name string) bool {
	return strings.HasPrefix(name, "eval/") && !strings.HasSuffix(name, "/samples") && !strings.HasSuffix(name, "/failed") && !strings.HasSuffix(name, "_stderr")
}

// evalNames returns the names of the metrics of an evaluation, main metrics first.
func evalNames(metrics map[string]float64) []string {
	var names []string
	for name := range metrics {
		if IsEvalName(name) {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b string) int {
		rank := func(name string) int {
			if at := slices.Index(EvalNames, name); at >= 0 {
				return at
			}
			return len(EvalNames)
		}
		return cmp.Or(rank(a)-rank(b), strings.Compare(a, b))
	})
	return names
}
