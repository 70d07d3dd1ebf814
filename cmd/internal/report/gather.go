// Package report writes a report of a run: a reward curve (PNG) and a page with charts (HTML).
package report

import (
	"context"
	"math"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Data is the content of a report.
type Data struct {
	Run    *live.Run
	Series map[string]Series
	Kept   []record.Kept // completions of the first and the last step with completions
}

// Series is one metric by step.
type Series []Point

// Point is the value of a metric at a step.
type Point struct {
	Step  float64 `json:"step"`
	Value float64 `json:"value"`
}

// warningsMax limits the warnings that are read.
const warningsMax = 1000

// noted are the kinds of warnings that a report lists. Others repeat the state of the run.
var noted = []string{"log", "group.excluded", "step.flat", "health.collapse", "gate.no_metric", "gate.not_restored", "lineage.forked"}

// Gather reads a run's status, metrics, evaluations and completions.
func Gather(ctx context.Context, r record.Reader, name string) (*Data, error) {
	status, err := r.Run(ctx, name)
	if err != nil {
		return nil, err
	}
	runID := status.GetRun().GetRunId()
	metrics := map[string]*thinning{}
	err = r.Metrics(ctx, runID, func(series *storagev1.Series) {
		kept := metrics[series.GetName()]
		if kept == nil {
			kept = &thinning{every: 1}
			metrics[series.GetName()] = kept
		}
		for _, p := range series.GetPoints() {
			kept.add(Point{float64(p.GetStep()), p.GetValue()})
		}
	})
	if err != nil {
		return nil, err
	}
	warnings, err := r.Events(ctx, &storagev1.EventFilter{RunId: runID, MinLevel: eventv1.Level_LEVEL_WARN}, warningsMax, true)
	if err != nil {
		return nil, err
	}
	data := &Data{Run: &live.Run{}, Series: map[string]Series{}}
	data.Run.Update(status)
	shown := &storagev1.EventFilter{RunId: runID, Kinds: []string{"eval.finished", "snapshot.created"}}
	if err := record.Each(ctx, r, shown, func(e *eventv1.Event) error { data.Run.Add(e); return nil }); err != nil {
		return nil, err
	}
	for _, e := range warnings {
		if slices.Contains(noted, e.GetKind()) {
			data.Run.Add(e)
		}
	}
	for name, kept := range metrics {
		data.Series[name] = kept.points()
	}
	for _, eval := range data.Run.Evals { // evaluations may not be among the stored metrics
		for name, value := range eval.Metrics {
			if strings.HasPrefix(name, "eval/") && metrics[name] == nil {
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

// curve returns the main series: the reward, else the loss.
func (d *Data) curve() (name string, points Series) {
	if points := d.Series["reward/mean"]; len(points) > 0 && !d.Run.Supervised() {
		return "reward/mean", points
	}
	return "loss", d.Series["loss"]
}

// evalCurve returns the main series of the evaluations.
func (d *Data) evalCurve() (name string, points Series) {
	if curve, _ := d.curve(); curve == "loss" && len(d.Series["eval/loss"]) > 0 {
		return "eval/loss", d.Series["eval/loss"] // shown with the training loss; the two diverge with overfitting
	}
	for _, name := range live.EvalNames {
		if points := d.Series[name]; len(points) > 0 {
			return name, points
		}
	}
	return "", nil
}

// smooth returns a running mean over a twentieth of the points.
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

// mostPoints is the number of points that a report keeps of a metric.
const mostPoints = 4096

// thinning keeps a series of any length as at most mostPoints means of equally many points.
type thinning struct {
	kept  Series
	every int   // points in each mean
	sum   Point // of the points that are not in a mean yet
	n     int
}

func (t *thinning) add(p Point) {
	if t.every > 1 && !finite(p.Value) {
		return // the mean of its neighbors stands for it
	}
	t.sum.Step, t.sum.Value, t.n = t.sum.Step+p.Step, t.sum.Value+p.Value, t.n+1
	if t.n < t.every {
		return
	}
	t.kept = t.points()
	t.sum, t.n = Point{}, 0
	if len(t.kept) < mostPoints {
		return
	}
	for i := range mostPoints / 2 {
		x, y := t.kept[2*i], t.kept[2*i+1]
		switch {
		case !finite(x.Value):
			t.kept[i] = y
		case !finite(y.Value):
			t.kept[i] = x
		default:
			t.kept[i] = Point{(x.Step + y.Step) / 2, (x.Value + y.Value) / 2}
		}
	}
	t.kept, t.every = t.kept[:mostPoints/2], 2*t.every
}

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// points returns the series so far.
func (t *thinning) points() Series {
	if t.n == 0 {
		return t.kept
	}
	return append(t.kept, Point{t.sum.Step / float64(t.n), t.sum.Value / float64(t.n)})
}
