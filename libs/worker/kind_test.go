package worker_test

import (
	"encoding/json"
	"os"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/worker"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Python has the same table (python/tests/worker/test_kinds.py).
func TestKindsAreThoseOfPython(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../schemas/golden/worker_kinds.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden, got []string
	if err := json.Unmarshal(text, &golden); err != nil {
		t.Fatal(err)
	}
	for _, kind := range worker.Kinds {
		got = append(got, kind.Name)
	}
	if slices.Sort(got); !slices.Equal(got, golden) {
		t.Errorf("kinds %q, want %q", got, golden)
	}
}

// A run with environment workers has as many as `multistep.environment_workers`.
func TestEnvironmentWorkers(t *testing.T) {
	t.Parallel()
	acts := &configv1.RunConfig{Multistep: &configv1.MultistepConfig{EnvironmentWorkers: proto.Uint32(2)}}
	for name, c := range map[string]struct {
		config *configv1.RunConfig
		want   int
	}{
		"with": {acts, 2}, "in the inference workers": {&configv1.RunConfig{Multistep: &configv1.MultistepConfig{}}, 0}, "of a language model": {&configv1.RunConfig{}, 0},
	} {
		if got := worker.Environment.Count(c.config); got != c.want {
			t.Errorf("%s: %d environment workers, want %d", name, got, c.want)
		}
	}
}

// A run that trains on rows samples for evaluations with a reward only. Without them it has no
// inference worker and no reward worker.
func TestRunsThatDoNotSampleHaveNoInferenceWorkers(t *testing.T) {
	t.Parallel()
	dpo := func() *configv1.RunConfig {
		return &configv1.RunConfig{
			Engine:    &configv1.EngineConfig{Workers: proto.Uint32(3)},
			Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dpo{Dpo: &configv1.DpoConfig{}}},
			Reward:    &configv1.RewardConfig{Model: &configv1.ScoringModelConfig{Path: proto.String("reward")}},
		}
	}
	count := func(c *configv1.RunConfig) [3]int {
		return [3]int{worker.Learner.Count(c), worker.Inference.Count(c), worker.Reward.Count(c)}
	}
	evaluated, loss := dpo(), dpo()
	evaluated.Eval = &configv1.EvalConfig{EverySteps: proto.Uint64(5)}
	loss.Eval, loss.Reward = evaluated.GetEval(), nil
	grpo := dpo()
	grpo.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Grpo{Grpo: &configv1.GrpoConfig{}}}
	for name, c := range map[string]struct {
		config *configv1.RunConfig
		want   [3]int
	}{
		"without evaluation": {dpo(), [3]int{1, 0, 0}}, "evaluated by the loss": {loss, [3]int{1, 0, 0}},
		"evaluated by a reward": {evaluated, [3]int{1, 3, 1}}, "sampled": {grpo, [3]int{1, 3, 1}},
	} {
		if got := count(c.config); got != c.want {
			t.Errorf("%s: %d learners, inference workers, reward workers; want %d", name, got, c.want)
		}
	}
}
