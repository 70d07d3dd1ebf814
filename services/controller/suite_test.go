package controller

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

func withSuites() *configv1.RunConfig {
	return &configv1.RunConfig{
		Seed: proto.Uint64(7), Data: &configv1.DataConfig{Eval: proto.String("held.jsonl")}, Reward: &configv1.RewardConfig{},
		Eval: &configv1.EvalConfig{EverySteps: proto.Uint64(2), MaxPrompts: proto.Uint32(9), Suites: map[string]*configv1.EvalSuiteConfig{
			"sums": {Samples: proto.Uint32(2), Metrics: []string{"mean", "pass@2"}, PassScore: proto.Float64(1), Limit: proto.Uint64(3), Seed: proto.Uint64(5)},
			"chat": {},
		}},
	}
}

func TestAnEvaluationHasTheSuites(t *testing.T) {
	t.Parallel()
	s := settings{cfg: withSuites(), runID: run}
	if got := s.evaluatedSuites(); !slices.Equal(got, []string{heldOut, "chat", "sums"}) {
		t.Errorf("evaluated %q", got)
	}
	for name, want := range map[string]*inferencev1.EvaluateRequest{
		heldOut: {RunId: run, MaxPrompts: 9, Seed: 7},
		"sums":  {RunId: run, Suite: "sums", MaxPrompts: 3, Samples: 2, Temperature: 1, Seed: 5},
		"chat":  {RunId: run, Suite: "chat", Samples: 1, Seed: 7},
	} {
		if got := s.request(name); !proto.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	s.cfg.Data.Eval = nil
	if got := s.evaluatedSuites(); !slices.Equal(got, []string{"chat", "sums"}) {
		t.Errorf("without held-out rows: %q", got)
	}
	s.cfg.Eval.EverySteps = nil
	if got := s.evaluatedSuites(); !slices.Equal(got, []string{heldOut}) {
		t.Errorf("without evaluations: %q", got)
	}
}

// A row is one observation. A sample that failed has no score, and a row with too few scores has no
// pass@K.
func TestMetricsOfSuites(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sample := func(row uint64, number uint32, reward float64) *inferencev1.EvalSample {
		return &inferencev1.EvalSample{Row: row, Sample: number, Reward: reward, Metrics: map[string]float64{"length": float64(row)}}
	}
	failure := &inferencev1.EvalSample{Row: 2, Outcome: trajectoryv1.Outcome_OUTCOME_INFRA_FAILED}
	samples := []*inferencev1.EvalSample{failure, sample(1, 1, 0), sample(0, 0, 1), sample(1, 0, 0), sample(2, 1, 1), sample(0, 1, 0)}
	sortByRow(samples)
	if samples[1].GetSample() != 1 || samples[5].GetSample() != 1 {
		t.Fatalf("order %v", samples)
	}
	r := &reporter{settings: settings{cfg: withSuites()}, bus: w, now: time.Now, samples: 16}
	means := r.evaluated(4, &weightsv1.WeightsManifest{Version: 4}, []answers{{heldOut, samples[:1]}, {"sums", samples}})
	for name, want := range map[string]float64{
		"eval/reward": 1, "eval/samples": 1, "eval/sums/mean": 0.5, "eval/sums/pass@2": 0.5, "eval/sums/length": 1, "eval/sums/samples": 6, "eval/sums/failed": 1,
		"eval/sums/mean_stderr": 0.5 / math.Sqrt(3), "eval/sums/pass@2_stderr": 0.5,
	} {
		if got, ok := means[name]; !ok || math.Abs(got-want) > 1e-9 {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	e := w.events[0]
	if text := e.GetMessage(); !strings.HasPrefix(text, "evaluation at step 4: reward 1.000 over 1 held-out prompts; suite sums: mean 0.500 (") || !strings.HasSuffix(text, "1 failed and are not counted") {
		t.Errorf("message %q", text)
	}
	var results []suiteResult
	if err := json.Unmarshal([]byte(e.GetAttributes()["suites"]), &results); err != nil || len(results) != 1 {
		t.Fatalf("%v in %q", err, e.GetAttributes()["suites"])
	}
	if pass := results[0].Metrics[1]; pass.Metric != "pass@2" || pass.Rows != 2 || pass.Interval != "wilson" || pass.Low == nil || *pass.Low >= 0.5 || *pass.High <= 0.5 {
		t.Errorf("%+v", pass)
	}
	r.evaluated(6, nil, []answers{{"sums", []*inferencev1.EvalSample{failure}}})
	if text := w.events[1].GetMessage(); !strings.Contains(text, "suite sums: no sample was scored; 1 failed") {
		t.Errorf("message %q", text)
	}
}
