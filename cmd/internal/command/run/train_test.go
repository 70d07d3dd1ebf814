package run

import (
	"strings"
	"testing"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

func TestTrainIsForData(t *testing.T) {
	t.Parallel()
	plan := func(kind *configv1.AlgorithmConfig) *planv1.Plan {
		return &planv1.Plan{Config: &configv1.RunConfig{Algorithm: kind}}
	}
	dpo := plan(&configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dpo{}})
	grpo := plan(&configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Grpo{}})
	train, run := runFlags{dataOnly: true}, runFlags{}
	if err := train.fits(dpo); err != nil {
		t.Errorf("DPO is refused: %v", err)
	}
	if err := train.fits(grpo); err == nil || !strings.Contains(err.Error(), "GRPO samples from the policy") {
		t.Errorf("GRPO: %v", err)
	}
	if err := run.fits(grpo); err != nil {
		t.Errorf("rollout run refuses GRPO: %v", err)
	}
}
