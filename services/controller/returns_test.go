package controller

import (
	"math"
	"testing"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

func TestReturnsHaveAnIntervalAndCountFailuresApart(t *testing.T) {
	t.Parallel()
	var samples []*inferencev1.EvalSample
	for row, reward := range []float64{10, 20, 30} {
		samples = append(samples, &inferencev1.EvalSample{
			Row: uint64(row), Reward: reward, Metrics: map[string]float64{"steps": reward / 2}, Outcome: trajectoryv1.Outcome_OUTCOME_TRUNCATED,
		})
	}
	samples = append(samples, &inferencev1.EvalSample{Row: 3, Outcome: trajectoryv1.Outcome_OUTCOME_INFRA_FAILED})
	stderr := 10 / math.Sqrt(3)
	want := map[string]float64{
		"eval/episodes": 4, "eval/failed": 1, "eval/return": 20, "eval/steps": 10, "eval/return_stderr": stderr,
		"eval/return_low": 20 - 1.96*stderr, "eval/return_high": 20 + 1.96*stderr,
	}
	got := returns(samples)
	for name, value := range want {
		if math.Abs(got[name]-value) > 1e-3 {
			t.Errorf("%s is %v, not %v", name, got[name], value)
		}
	}
	if len(got) != len(want) {
		t.Error(got)
	}
	if text := heldOutText(got); text != "return 20.000 (8.684 to 31.316) over 3 episodes" {
		t.Error(text)
	}
	none := returns(samples[3:])
	if _, found := none["eval/return"]; found || none["eval/failed"] != 1 {
		t.Error(none)
	}
	if text := heldOutText(none); text != "no held-out prompt was scored" {
		t.Error(text)
	}
	equal := returns(samples[:1])
	if _, found := equal["eval/return_low"]; found || equal["eval/return"] != 10 || heldOutText(equal) != "return 10.000 over 1 episodes" {
		t.Error(equal)
	}
}
