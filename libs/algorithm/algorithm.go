// Package algorithm answers what a run's algorithm asks of the services: what it is called, and where its tokens come from.
package algorithm

import (
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Name is the table that the configuration chose, such as "grpo"; "" where it chose none.
func Name(config *configv1.RunConfig) string {
	if field := chosen(config); field != nil {
		return field.TextName()
	}
	return ""
}

// FromData reports whether tokens come from the rows themselves: nothing is sampled, so there is neither staleness nor reward.
func FromData(config *configv1.RunConfig) bool {
	switch config.GetAlgorithm().GetKind().(type) {
	case *configv1.AlgorithmConfig_Sft, *configv1.AlgorithmConfig_RewardModel, *configv1.AlgorithmConfig_Dpo,
		*configv1.AlgorithmConfig_Ipo, *configv1.AlgorithmConfig_Kto:
		return true
	}
	return false
}

// Samples reports whether a run asks a model for completions at all: one that is trained on rows does so for its evaluations alone,
// where a reward scores them.
func Samples(config *configv1.RunConfig) bool {
	return !FromData(config) || config.GetEval().GetEverySteps() > 0 && config.GetReward() != nil
}

// TeachesHeldOut reports whether held-out rows are evaluated as the training rows are trained on, by their loss: nobody answers them.
func TeachesHeldOut(config *configv1.RunConfig) bool {
	return FromData(config) && config.GetEval().GetEverySteps() > 0 && config.GetReward() == nil
}

// Pairs reports whether a row holds a chosen and a rejected completion.
func Pairs(config *configv1.RunConfig) bool {
	switch kind := config.GetAlgorithm().GetKind().(type) {
	case *configv1.AlgorithmConfig_RewardModel, *configv1.AlgorithmConfig_Dpo, *configv1.AlgorithmConfig_Ipo:
		return true
	case *configv1.AlgorithmConfig_Kto:
		return kind.Kto.GetPaired()
	}
	return false
}

// GroupSize is how many trajectories make a group complete: the two of a pair, else what is sampled of a prompt.
func GroupSize(config *configv1.RunConfig) uint32 {
	if Pairs(config) {
		return 2
	}
	return config.GetSampling().GetGroupSize()
}

// Generates reports whether the weights that a run makes can answer prompts: those of a reward model can't.
func Generates(config *configv1.RunConfig) bool {
	return config.GetAlgorithm().GetRewardModel() == nil
}

// DrawBatches is how many batches' worth of groups a step may go through until it has a batch of groups whose rewards differ
// (dynamic sampling); 0 where it takes groups as they come. Plans of before `sampling.refill_rounds` have none.
func DrawBatches(config *configv1.RunConfig) uint32 {
	field := chosen(config)
	if field == nil {
		return 0
	}
	settings := config.GetAlgorithm().ProtoReflect().Get(field).Message()
	on := settings.Descriptor().Fields().ByName("dynamic_sampling")
	if on == nil || !settings.Get(on).Bool() {
		return 0
	}
	return config.GetSampling().GetRefillRounds()
}

// TakesTokenRewards reports whether the algorithm has an advantage of its own for each token, so that rewards of parts of a
// completion mean something to it. GSPO and RLOO take a completion as one action.
func TakesTokenRewards(config *configv1.RunConfig) bool {
	switch config.GetAlgorithm().GetKind().(type) {
	case *configv1.AlgorithmConfig_Ppo, *configv1.AlgorithmConfig_ReinforcePp, *configv1.AlgorithmConfig_Grpo,
		*configv1.AlgorithmConfig_DrGrpo, *configv1.AlgorithmConfig_Dapo, *configv1.AlgorithmConfig_Cispo:
		return true
	}
	return false
}

// Title is the algorithm by the name that papers give it.
func Title(config *configv1.RunConfig) string {
	return titles[Name(config)]
}

var titles = map[string]string{
	"sft": "supervised fine-tuning", "reward_model": "reward model", "ppo": "PPO", "grpo": "GRPO", "dr_grpo": "Dr. GRPO", "dapo": "DAPO",
	"gspo": "GSPO", "cispo": "CISPO", "rloo": "RLOO", "reinforce_pp": "REINFORCE++", "dpo": "DPO", "ipo": "IPO", "kto": "KTO",
	"distillation": "on-policy distillation", "online_dpo": "online DPO",
}

func chosen(config *configv1.RunConfig) protoreflect.FieldDescriptor {
	message := config.GetAlgorithm().ProtoReflect()
	return message.WhichOneof(message.Descriptor().Oneofs().ByName("kind"))
}
