package live

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/wait"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const (
	sparkWidth = 40
	workersMax = 8 // workers shown individually
)

// View draws the run as lines of at most width columns.
func (r *Run) View(s output.Style, width int, zone *time.Location, hint string) string {
	status := r.Status
	if status == nil {
		return "waiting for the run's status\n"
	}
	lines := []string{r.title(s)}
	switch waiting := status.GetWaitingFor(); {
	case waiting != "":
		lines = append(lines, label(s, "waits for")+waiting+s.Dim(r.waited()))
	case !Ended(status.GetRun().GetState()): // so that the lines below do not move
		lines = append(lines, label(s, "waits for")+s.Dim("nothing"))
	}
	for _, worker := range status.GetWorkers() {
		for _, w := range worker.GetWaits() {
			if strings.HasPrefix(w.GetReason(), wait.Plugin) {
				lines = append(lines, label(s, "plugin")+s.Yellow(w.GetReason())+"  "+w.GetEvidence()+" ("+worker.GetWorkerId()+")")
			}
		}
	}
	lines = append(lines, r.progress(s, width))
	lines = append(lines, r.curves(s, width)...)
	samples, tokens := r.Speed()
	speed := fmt.Sprintf("%s samples/s  %s tokens/s", output.Count(samples), output.Count(tokens))
	if t := r.Step["time/step"]; t > 0 {
		speed += fmt.Sprintf("  %s per step", seconds(t))
	}
	lines = append(lines, label(s, "speed")+speed)
	if q := status.GetQueues(); q != nil {
		lines = append(lines, label(s, "groups")+fmt.Sprintf("%s in flight  %s ready  %s leased  %s consumed  %s excluded",
			output.Count(q.GetInFlight()), output.Count(q.GetReady()), output.Count(q.GetLeased()), output.Count(q.GetConsumed()), output.Count(q.GetExcluded())))
		if failures := r.Failures(); failures != "" {
			lines = append(lines, label(s, "failed")+s.Yellow(failures))
		}
	}
	lines = append(lines, r.workers(s)...)
	for _, w := range r.Warnings {
		lines = append(lines, warning(w.Event, w.Count, s, zone))
	}
	if hint != "" {
		lines = append(lines, s.Dim(hint))
	}
	for i, line := range lines {
		lines[i] = ansi.Truncate(strings.ReplaceAll(line, "\n", " "), max(width, 20), "…")
	}
	return strings.Join(lines, "\n") + "\n"
}

// Failures describes the samples that failed because of infrastructure by reason, the most frequent
// ones first; "" if there are none.
func (r *Run) Failures() string {
	failures := r.Status.GetQueues().GetFailures()
	reasons := slices.Collect(maps.Keys(failures))
	slices.SortFunc(reasons, func(a, b string) int { return cmp.Or(cmp.Compare(failures[b], failures[a]), cmp.Compare(a, b)) })
	total, texts := uint64(0), []string{}
	for _, reason := range reasons {
		total += failures[reason]
		texts = append(texts, output.Count(failures[reason])+" "+reason)
	}
	if total == 0 {
		return ""
	}
	return output.Plural(total, "sample") + ": " + strings.Join(texts, ", ")
}

// waited returns how long the run has been waiting, from two seconds on.
func (r *Run) waited() string {
	since := r.Status.GetWaitingSince()
	if since == nil {
		return ""
	}
	now := time.Now
	if r.now != nil {
		now = r.now
	}
	if spent := now().Sub(since.AsTime()); spent >= 2*time.Second {
		return fmt.Sprintf("  %s so far", output.Duration(spent.Truncate(time.Second)))
	}
	return ""
}

func label(s output.Style, name string) string { return s.Dim(fmt.Sprintf("%-10s", name)) }

func (r *Run) title(s output.Style) string {
	run := r.Status.GetRun()
	state := State(run.GetState())
	switch run.GetState() {
	case runv1.RunState_RUN_STATE_RUNNING, runv1.RunState_RUN_STATE_SUCCEEDED:
		state = s.Green(state)
	case runv1.RunState_RUN_STATE_FAILED:
		state = s.Red(state)
	default:
		state = s.Yellow(state)
	}
	title := fmt.Sprintf("%s  %s  %s", s.Bold(run.GetName()), s.Dim(run.GetRunId()), state)
	if phase := r.Status.GetPhase(); phase != "" && !Ended(run.GetState()) {
		title += "  " + s.Cyan(phase)
	}
	return title
}

func (r *Run) progress(s output.Style, width int) string {
	done, total := r.CommittedSteps(), r.Status.GetRun().GetTotalSteps()
	percent := 0.0
	if total > 0 {
		percent = 100 * float64(done) / float64(total)
	}
	line := label(s, "step") + fmt.Sprintf("%s/%s  %s  %.0f %%",
		output.Count(done), output.Count(total), s.Green(Bar(done, total, min(sparkWidth, max(10, width-50)))), percent)
	if left, ok := r.Remaining(); ok {
		line += "  " + output.Duration(left) + " left"
	}
	return line
}

// curves returns the sparklines, each with its last value.
func (r *Run) curves(s output.Style, width int) []string {
	var lines []string
	columns := min(sparkWidth, max(10, width-50))
	if n := len(r.Reward); n > 0 {
		name := "reward"
		var rest []string
		if r.Supervised() {
			name = "loss"
		} else if loss, ok := r.Step["loss"]; ok {
			rest = append(rest, "loss "+output.Number(loss))
		}
		for _, metric := range preferenceNames {
			if v, ok := r.Step[metric]; ok {
				rest = append(rest, strings.TrimPrefix(metric, "rewards/")+" "+preference(v))
			}
		}
		for _, metric := range []string{"entropy", "mismatch/kl", "grad_norm", "learning_rate"} {
			if v, ok := r.Step[metric]; ok {
				rest = append(rest, strings.NewReplacer("_", " ", "/", " ").Replace(metric)+" "+output.Number(v))
			}
		}
		lines = append(lines, label(s, name)+s.Cyan(Spark(r.Reward, columns))+"  "+s.Bold(output.Number(r.Reward[n-1]))+"  "+s.Dim(strings.Join(rest, "  ")))
	}
	if len(r.Evals) > 0 {
		lines = append(lines, label(s, "held-out")+r.heldOut(s, columns))
	}
	return lines
}

// heldOut returns the sparkline of the evaluations, and how many rows of the last one failed.
func (r *Run) heldOut(s output.Style, columns int) string {
	values, name, step := r.Accuracy()
	var parts []string
	if n := len(values); n > 0 {
		parts = append(parts, s.Cyan(Spark(values, columns)), s.Bold(output.Number(values[n-1])),
			s.Dim(fmt.Sprintf("%s after step %d, %s at first", name, step, output.Number(values[0]))))
	}
	last := r.Evals[len(r.Evals)-1]
	if failed := counted(last.Metrics, "failed"); failed > 0 {
		parts = append(parts, s.Yellow(fmt.Sprintf("%s of %s samples failed after step %d",
			output.Count(failed), output.Count(counted(last.Metrics, "samples")), last.Step)))
	}
	return strings.Join(parts, "  ")
}

func (r *Run) workers(s output.Style) []string {
	var table output.Table
	workers := r.Status.GetWorkers()
	for i, w := range workers {
		name := ""
		if i == 0 {
			name = "workers"
		}
		if i == workersMax && len(workers) > workersMax+1 {
			table.Row(fmt.Sprintf("%-8s", ""), fmt.Sprintf("and %d more", len(workers)-workersMax))
			break
		}
		health := s.Green("healthy")
		if !w.GetHealthy() {
			health = s.Yellow("not ready")
		}
		about := w.GetActivity()
		if w.GetRestarts() > 0 {
			about += s.Yellow(fmt.Sprintf("  %d restarts", w.GetRestarts()))
		}
		speed := ""
		if w.GetSamplesPerSecond() > 0 {
			speed = output.Count(w.GetSamplesPerSecond()) + " samples/s"
		}
		table.Row(s.Dim(fmt.Sprintf("%-8s", name)), w.GetWorkerId(), health, fmt.Sprintf("weights v%d", w.GetWeightsVersion()), speed, about)
	}
	text := strings.TrimSuffix(table.String(), "\n")
	if text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

// warning formats a warning that stands for count events.
func warning(e *eventv1.Event, count uint64, s output.Style, zone *time.Location) string {
	mark := s.Yellow("warning")
	if e.GetLevel() >= eventv1.Level_LEVEL_ERROR {
		mark = s.Red("error")
	}
	often := ""
	if count > 1 {
		often = s.Bold(fmt.Sprintf("%s times: ", output.Count(count)))
	}
	return fmt.Sprintf("%s %s %s: %s%s", s.Dim(clock(e.GetTime().AsTime(), zone)), mark, e.GetService(), often, e.GetMessage())
}

func clock(t time.Time, zone *time.Location) string {
	if zone == nil {
		zone = time.Local
	}
	return t.In(zone).Format("15:04:05")
}

func seconds(s float64) string {
	if s < 1 {
		return fmt.Sprintf("%.0f ms", 1000*s)
	}
	return output.Duration(time.Duration(s * float64(time.Second)))
}
