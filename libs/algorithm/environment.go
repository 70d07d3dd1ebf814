package algorithm

import (
	"slices"

	"google.golang.org/protobuf/proto"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// EnvironmentRewards reports whether the environment of a run scores its episodes, so that the run
// has no other reward.
func EnvironmentRewards(config *configv1.RunConfig) bool {
	if config.GetMultistep() != nil {
		return true
	}
	kind := (&configv1.EnvironmentConfig{}).ProtoReflect().Descriptor().Fields().ByName("kind")
	meta, _ := proto.GetExtension(kind.Options(), configv1.E_Meta).(*configv1.FieldMeta)
	return slices.Contains(meta.GetRewarding(), config.GetEnvironment().GetKind())
}

// Rewarded reports whether workers score what the policy samples, with the reward or in the
// environment.
func Rewarded(config *configv1.RunConfig) bool {
	return config.GetReward() != nil || EnvironmentRewards(config)
}

// Turns reports whether episodes may have several turns.
func Turns(config *configv1.RunConfig) bool {
	kind := config.GetEnvironment().GetKind()
	return kind != "" && kind != "single_turn" && kind != "external"
}
