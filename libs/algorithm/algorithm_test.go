package algorithm

import (
	"testing"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"google.golang.org/protobuf/proto"
)

func TestEveryAlgorithmOfTheContractHasATitleAndASource(t *testing.T) {
	t.Parallel()
	data := map[string]bool{"sft": true, "reward_model": true, "dpo": true, "ipo": true, "kto": true}
	config := &configv1.RunConfig{Algorithm: &configv1.AlgorithmConfig{}}
	fields := config.GetAlgorithm().ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		config.Algorithm = &configv1.AlgorithmConfig{}
		message := config.GetAlgorithm().ProtoReflect()
		message.Set(field, message.NewField(field))
		if Name(config) != field.TextName() || Title(config) == "" || FromData(config) != data[field.TextName()] {
			t.Errorf("%s: named %q, titled %q, from data %v", field.TextName(), Name(config), Title(config), FromData(config))
		}
		pairs := map[string]bool{"reward_model": true, "dpo": true, "ipo": true}[field.TextName()]
		config.Sampling = &configv1.SamplingConfig{GroupSize: proto.Uint32(5)}
		if Pairs(config) != pairs || (GroupSize(config) == 2) != pairs || Generates(config) == (field.TextName() == "reward_model") {
			t.Errorf("%s: pairs %v, groups of %d, generates %v", field.TextName(), Pairs(config), GroupSize(config), Generates(config))
		}
		config.Sampling = nil
		quiet := Samples(config)
		config.Eval = &configv1.EvalConfig{EverySteps: proto.Uint64(1)}
		computed, bare := TeachesHeldOut(config), Samples(config)
		config.Reward = &configv1.RewardConfig{}
		if quiet == data[field.TextName()] || bare != quiet || computed == quiet || !Samples(config) || TeachesHeldOut(config) {
			t.Errorf("%s: samples %v, with evaluations %v, which a reward scores %v", field.TextName(), quiet, bare, Samples(config))
		}
		config.Eval, config.Reward = nil, nil
	}
	paired := &configv1.KtoConfig{Paired: proto.Bool(true)}
	config.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Kto{Kto: paired}}
	if !Pairs(config) || GroupSize(config) != 2 {
		t.Error("paired KTO has no pairs")
	}
	if empty := (&configv1.RunConfig{}); Name(empty) != "" || FromData(empty) {
		t.Error("a configuration without an algorithm has one")
	}
}
