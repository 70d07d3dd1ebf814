// Package report turns what is stored of a run into a reward curve (PNG) and a page (HTML) that needs no network.
package report

import (
	"context"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Data is what a report is made of.
type Data struct {
	Run    *live.Run
	Series map[string]Series
	Kept   []record.Kept // completions of the first and the last step that kept some
}

// Series is one metric by step.
type Series []Point

// Point is a number at a step.
type Point struct{ Step, Value float64 }

// evalsMax is the most evaluations read; their samples make them large.
const evalsMax = 10000

// warningsMax is the most warnings read; those that say the same are joined.
const warningsMax = 1000

// Gather reads a run's status, metrics, evaluations and completions.
func Gather(ctx context.Context, r record.Reader, name string) (*Data, error) {
	status, err := r.Run(ctx, name)
	if err != nil {
		return nil, err
	}
	runID := status.GetRun().GetRunId()
	metrics, err := r.Metrics(ctx, runID)
	if err != nil {
		return nil, err
	}
	events, err := r.Events(ctx, &storagev1.EventFilter{RunId: runID, Kinds: []string{"eval.finished", "snapshot.created"}}, evalsMax, false)
	if err != nil {
		return nil, err
	}
	warnings, err := r.Events(ctx, &storagev1.EventFilter{RunId: runID, MinLevel: eventv1.Level_LEVEL_WARN}, warningsMax, true)
	if err != nil {
		return nil, err
	}
	data := &Data{Run: &live.Run{}, Series: map[string]Series{}}
	data.Run.Update(status)
	for _, e := range events {
		data.Run.Add(e)
	}
	for _, e := range warnings {
		if e.GetKind() == "log" || e.GetKind() == "group.excluded" || e.GetKind() == "step.flat" { // what the end says is said by the state
			data.Run.Add(e)
		}
	}
	for _, series := range metrics {
		var points Series
		for _, p := range series.GetPoints() {
			points = append(points, Point{float64(p.GetStep()), p.GetValue()})
		}
		data.Series[series.GetName()] = points
	}
	for _, eval := range data.Run.Evals { // evaluations may not be among the stored metrics
		for name, value := range eval.Metrics {
			if strings.HasPrefix(name, "eval/") && !stored(metrics, name) {
				data.Series[name] = append(data.Series[name], Point{float64(eval.Step), value})
			}
		}
	}
	first, err := record.FirstCompletions(ctx, r, runID)
	if err != nil {
		return nil, err
	}
	newest, err := record.NewestCompletions(ctx, r, runID)
	if err != nil {
		return nil, err
	}
	for _, kept := range []record.Kept{first, newest} {
		if len(kept.Completions) > 0 && (len(data.Kept) == 0 || data.Kept[0].Step != kept.Step) {
			data.Kept = append(data.Kept, kept)
		}
	}
	return data, nil
}

func stored(metrics []*storagev1.Series, name string) bool {
	for _, series := range metrics {
		if series.GetName() == name {
			return true
		}
	}
	return false
}

// curve is the series that the run is about: reward, or loss where nothing is rewarded.
func (d *Data) curve() (name string, points Series) {
	if points := d.Series["reward/mean"]; len(points) > 0 && !d.Run.Supervised() {
		return "reward/mean", points
	}
	return "loss", d.Series["loss"]
}

// held is the evaluation's series: of what it is about.
func (d *Data) held() (name string, points Series) {
	if curve, _ := d.curve(); curve == "loss" && len(d.Series["eval/loss"]) > 0 {
		return "eval/loss", d.Series["eval/loss"] // beside that of the steps: the two part where rows are learned by heart
	}
	for _, name := range live.EvalNames {
		if points := d.Series[name]; len(points) > 0 {
			return name, points
		}
	}
	return "", nil
}

// smooth is a running mean over a twentieth of the points to either side.
func (s Series) smooth() Series {
	radius := len(s) / 40
	out := make(Series, len(s))
	for i := range s {
		from, to := max(0, i-radius), min(len(s), i+radius+1)
		out[i].Step = s[i].Step
		for _, p := range s[from:to] {
			out[i].Value += p.Value / float64(to-from)
		}
	}
	return out
}
