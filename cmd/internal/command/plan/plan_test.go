package plan

import (
	"testing"

	"google.golang.org/protobuf/proto"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// A step consists of prompts if the algorithm samples, else of rows or pairs.
func TestGist(t *testing.T) {
	t.Parallel()
	for want, kind := range map[string]*configv1.AlgorithmConfig{
		"GRPO with 8 samples per prompt, 3 steps of 32 prompts, sync":           {Kind: &configv1.AlgorithmConfig_Grpo{}},
		"PPO with 1 sample per prompt, 3 steps of 32 prompts, sync":             {Kind: &configv1.AlgorithmConfig_Ppo{Ppo: &configv1.PpoConfig{}}},
		"supervised fine-tuning on reference answers, 3 steps of 32 rows, sync": {Kind: &configv1.AlgorithmConfig_Sft{Sft: &configv1.SftConfig{}}},
		"reward model, 3 steps of 32 pairs, sync":                               {Kind: &configv1.AlgorithmConfig_RewardModel{}},
		"KTO, 3 steps of 32 rows, sync":                                         {Kind: &configv1.AlgorithmConfig_Kto{Kto: &configv1.KtoConfig{}}},
	} {
		size := uint32(8)
		if kind.GetPpo() != nil {
			size = 1
		}
		config := &configv1.RunConfig{
			Mode: proto.String("sync"), Algorithm: kind, Sampling: &configv1.SamplingConfig{GroupSize: &size},
			Train: &configv1.TrainConfig{Steps: proto.Uint64(3), GroupsPerStep: proto.Uint32(32)},
		}
		if got := gist(config); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
