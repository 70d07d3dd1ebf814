package report

import (
	"bytes"
	"errors"
	"image/png"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gonum.org/v1/plot/plotter"

	"github.com/rollout-rl/rollout/cmd/internal/live"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// learned is a run whose reward rises with noise.
func learned(steps int, config *configv1.RunConfig) *Data {
	d := &Data{Run: &live.Run{}, Series: map[string]Series{}}
	d.Run.Update(&runv1.RunStatus{Run: &runv1.Run{
		RunId: "run-01kapq3n8jz3gq5p1cs0e8q0vd", Name: "<addition>", TotalSteps: uint64(steps), Plan: &planv1.Plan{Config: config},
		State: runv1.RunState_RUN_STATE_SUCCEEDED,
	}})
	random := rand.New(rand.NewPCG(1, 2))
	for i := 1; i <= steps; i++ {
		x := float64(i)
		d.Series["reward/mean"] = append(d.Series["reward/mean"], Point{x, 0.95 - 0.45*math.Exp(-x/15) + 0.06*random.NormFloat64()})
		d.Series["loss"] = append(d.Series["loss"], Point{x, math.Exp(-x / 10)})
		d.Series["time/step"] = append(d.Series["time/step"], Point{x, 0.2})
		if i%10 == 0 || i == 1 {
			d.Series["eval/reward"] = append(d.Series["eval/reward"], Point{x, 0.95 - 0.45*math.Exp(-x/12)})
		}
	}
	return d
}

func TestPNG(t *testing.T) {
	t.Parallel()
	for name, d := range map[string]*Data{
		"grpo": learned(60, nil), "one-step": learned(1, nil), "empty": learned(0, nil),
		"sft": learned(600, &configv1.RunConfig{Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Sft{}}}),
		"nan": {Run: learned(1, nil).Run, Series: map[string]Series{"reward/mean": {{1, math.NaN()}, {2, math.Inf(1)}, {3, 0.5}}}},
	} {
		var b bytes.Buffer
		if err := d.PNG(&b); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if dir := os.Getenv("ROLLOUT_SHOW"); dir != "" { // to look at them
			_ = os.WriteFile(filepath.Join(dir, name+".png"), b.Bytes(), 0o644)
		}
		if image, err := png.Decode(&b); err != nil || image.Bounds().Dx() != 1296 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPageEscapesCompletions(t *testing.T) {
	t.Parallel()
	d := learned(60, nil)
	d.Run.Evals = []live.Eval{
		{Metrics: map[string]float64{"eval/reward": 0.5}, Samples: []live.Answer{{Row: 1, Prompt: "<b>1+1</b>", Completion: "<script>alert(1)</script>"}}},
		{Step: 60, Metrics: map[string]float64{"eval/reward": 0.9}, Samples: []live.Answer{{Row: 1, Prompt: "<b>1+1</b>", Completion: "2", Reward: ptr(1.0)}}},
	}
	var b bytes.Buffer
	if err := d.HTML(&b); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	if dir := os.Getenv("ROLLOUT_SHOW"); dir != "" {
		_ = os.WriteFile(filepath.Join(dir, "page.html"), b.Bytes(), 0o644)
	}
	for _, banned := range []string{"<script", "<b>", "<addition>"} {
		if strings.Contains(page, banned) {
			t.Errorf("%q is not escaped", banned)
		}
	}
	for _, want := range []string{"&lt;script&gt;", "0.500", "&#43;0.400", "seconds a step", "<svg"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
}

// The held-out loss is drawn with the training loss: where the two diverge, the model overfits.
func TestHeldOutLossIsDrawnWithTheTrainingLoss(t *testing.T) {
	t.Parallel()
	dpo := learned(60, &configv1.RunConfig{Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dpo{}}})
	delete(dpo.Series, "eval/reward")
	dpo.Series["eval/loss"], dpo.Series["eval/rewards/accuracy"] = Series{{0, 0.7}, {60, 0.3}}, Series{{0, 0}, {60, 0.9}}
	if name, points := dpo.evalCurve(); name != "eval/loss" || len(points) != 2 {
		t.Errorf("%s of %d points does not match the curve", name, len(points))
	}
	if first := dpo.panels()[0]; first.Title != "loss" || !strings.Contains(first.Note, "eval/loss on held-out rows (orange)") {
		t.Errorf("the first panel is %q, %q", first.Title, first.Note)
	}
	delete(dpo.Series, "eval/loss")
	if name, _ := dpo.evalCurve(); name != "eval/rewards/accuracy" {
		t.Errorf("%s does not match the curve", name)
	}
}

func TestChart(t *testing.T) {
	t.Parallel()
	if svg := chart(line{points: Series{{1, math.NaN()}}}); svg != "" {
		t.Errorf("a chart of nothing: %s", svg)
	}
	svg := string(chart(line{class: "a", points: learned(5000, nil).Series["loss"]}))
	if n := strings.Count(svg, "L"); n != maxPoints-1 {
		t.Errorf("%d points of 5,000", n+1)
	}
	if strings.Contains(svg, "NaN") || strings.Contains(svg, "Inf") {
		t.Error(svg)
	}
	flat := string(chart(line{class: "a", points: Series{{3, 0.2}}}))
	if strings.Contains(flat, "NaN") || !strings.Contains(flat, "M") {
		t.Error(flat)
	}
}

// A constant line is drawn on an axis that begins at 0.
func TestConstantLinesHaveAnAxisFromZero(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ low, high, wantLow, wantHigh float64 }{
		{0, 0, 0, 1}, {4e-4, 4e-4, 0, 5e-4}, {-2, -2, -2.5, 0}, {0.1, 0.1 + 1e-17, 0, 0.125}, {0.2, 0.3, 0.2, 0.3},
	} {
		if low, high := span(c.low, c.high); math.Abs(low-c.wantLow) > 1e-9 || math.Abs(high-c.wantHigh) > 1e-9 {
			t.Errorf("span(%g, %g) = %g, %g", c.low, c.high, low, high)
		}
	}
	zero := string(chart(line{class: "a", points: Series{{1, 0}, {2, 0}}}))
	if strings.Contains(zero, ">-0") {
		t.Errorf("the axis of zeros has negative numbers: %s", zero)
	}
	d := learned(3, nil)
	for i := range d.Series["time/step"] {
		d.Series["learning_rate"] = append(d.Series["learning_rate"], Point{float64(i + 1), 1e-4})
	}
	var b bytes.Buffer
	if err := d.HTML(&b); err != nil || !strings.Contains(b.String(), "constant at 1.00e-04") {
		t.Errorf("%v: the page does not say that the learning rate is constant", err)
	}
}

// The report of a run without a step says why there is none.
func TestReportOfARunThatMadeNoStep(t *testing.T) {
	t.Parallel()
	d := learned(0, nil)
	run := d.Run.Status.Run
	run.State, run.Reason, run.Message = runv1.RunState_RUN_STATE_FAILED, "EVERY_GROUP_EXCLUDED", "step 1: there is nothing to train on"
	for range 3 {
		d.Run.Add(&eventv1.Event{Kind: "log", Level: eventv1.Level_LEVEL_WARN, Service: "inference-worker/inference-0", Message: "a reward failed"})
	}
	var page, image bytes.Buffer
	if err := errors.Join(d.HTML(&page), d.PNG(&image)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"The run failed: EVERY_GROUP_EXCLUDED: step 1", "No step was committed", "3 times: inference-worker/inference-0: a reward failed"} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("the page lacks %q:\n%s", want, page.String())
		}
	}
	blank := learned(0, nil)
	blank.Run.Status.Run.State = runv1.RunState_RUN_STATE_CANCELLED
	var other bytes.Buffer
	if err := blank.PNG(&other); err != nil || bytes.Equal(other.Bytes(), image.Bytes()) {
		t.Errorf("%v: the picture does not say how the run ended", err)
	}
}

func TestAGateThatEndedTheRunIsNamed(t *testing.T) {
	t.Parallel()
	const evidence = "gate good: `eval/reward >= 0.8` holds at step 40: eval/reward is 0.85"
	for _, c := range []struct {
		state        runv1.RunState
		reason, want string
	}{
		{runv1.RunState_RUN_STATE_SUCCEEDED, "STOPPED_BY_GATE", "The run was stopped by " + evidence},
		{runv1.RunState_RUN_STATE_PAUSED, "PAUSED_BY_GATE", "The run was paused by " + evidence},
		{runv1.RunState_RUN_STATE_SUCCEEDED, "", ""},
		{runv1.RunState_RUN_STATE_PAUSED, "", ""},
	} {
		d := learned(60, nil)
		run := d.Run.Status.GetRun()
		run.State, run.Reason, run.Message = c.state, c.reason, evidence
		if got := strings.Join(d.notes(), "\n"); got != c.want {
			t.Errorf("%s %s: %q, want %q", c.state, c.reason, got, c.want)
		}
	}
}

func TestTicks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		low, high float64
		want      string
	}{
		{0, 1, "0 0.2 0.4 0.6 0.8 1"}, {1, 40, "10 20 30 40"}, {-0.3, 0.3, "-0.2 0 0.2"}, {0, 1e-7, "0 2e-08 4e-08 6e-08 8e-08 1e-07"}, {0, 123456, "0 5e+04 1e+05"},
	} {
		var got []string
		for _, tick := range ticks(c.low, c.high) {
			got = append(got, tickText(tick))
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("ticks(%g, %g) = %q, want %q", c.low, c.high, strings.Join(got, " "), c.want)
		}
	}
}

func TestSmoothKeepsTheEnds(t *testing.T) {
	t.Parallel()
	s := Series{{1, 0}, {2, 1}, {3, 0}}.smooth()
	if len(s) != 3 || s[1].Value != 1 {
		t.Errorf("three points are smoothed: %v", s)
	}
	if s = learned(200, nil).Series["reward/mean"].smooth(); len(s) != 200 || math.Abs(s[199].Value-0.95) > 0.05 {
		t.Errorf("the end is %v", s[199])
	}
}

func ptr[T any](v T) *T { return &v }

func TestTheLegendAvoidsTheCurves(t *testing.T) {
	t.Parallel()
	line := func(from, to float64) (out plotter.XYs) {
		for i := range 10 {
			out = append(out, plotter.XY{X: float64(i), Y: from + (to-from)*float64(i)/9})
		}
		return out
	}
	for name, c := range map[string]struct {
		curve, evals plotter.XYs
		top          bool
	}{
		"rises": {line(0, 1), line(0.1, 0.9), false}, "falls": {line(1, 0), nil, true}, "stays low": {line(0.02, 0.08), line(0.03, 0.05), true},
		"stays high": {line(0.8, 0.9), nil, false}, "evaluations alone": {nil, line(0.1, 0.2), true}, "nothing": {nil, nil, false},
	} {
		if got := low(c.curve, c.evals, 0.5); got != c.top {
			t.Errorf("%s: on top %v", name, got)
		}
	}
}
