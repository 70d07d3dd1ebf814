// Package algorithm says what the algorithm of a run needs from services, according to the traits
// in the contract (`option (algorithm)` in algorithm.proto) and the settings of the run.
package algorithm

import (
	"maps"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Name returns the name of the chosen table, such as "grpo", or "" if there is none.
func Name(config *configv1.RunConfig) string {
	if field := chosen(config); field != nil {
		return field.TextName()
	}
	return ""
}

// Traits are those of the chosen algorithm; the zero message without one.
func Traits(config *configv1.RunConfig) *configv1.AlgorithmTraits {
	if field := chosen(config); field != nil {
		return TraitsOf(field.Message())
	}
	return &configv1.AlgorithmTraits{}
}

// TraitsOf are the traits of the algorithm that a message configures.
func TraitsOf(message protoreflect.MessageDescriptor) *configv1.AlgorithmTraits {
	traits, _ := proto.GetExtension(message.Options(), configv1.E_Algorithm).(*configv1.AlgorithmTraits)
	return traits
}

// Defaults are the defaults of keys outside of the algorithm's table, by their paths in TOML. They
// depend on whether adapters are trained, and on whether the policy acts for many steps.
func Defaults(config *configv1.RunConfig) map[string]string {
	traits, defaults := Traits(config), map[string]string{}
	maps.Copy(defaults, traits.GetRunDefaults())
	if config.GetLora() != nil {
		maps.Copy(defaults, traits.GetLoraDefaults())
	}
	if table := config.GetMultistep(); table != nil {
		maps.Copy(defaults, TraitsOf(table.ProtoReflect().Descriptor()).GetRunDefaults())
	}
	return defaults
}

// Inlined reports whether the keys of a table-valued field belong to the table that holds it.
func Inlined(field protoreflect.FieldDescriptor) bool {
	meta, _ := proto.GetExtension(field.Options(), configv1.E_Meta).(*configv1.FieldMeta)
	return meta.GetInline()
}

// Setting is the value of a key of the algorithm's table, also of an inlined message. ok: the
// algorithm has such a key.
func Setting(config *configv1.RunConfig, key string) (value protoreflect.Value, ok bool) {
	field := chosen(config)
	if field == nil {
		return value, false
	}
	table := config.GetAlgorithm().ProtoReflect().Get(field).Message()
	fields := table.Descriptor().Fields()
	if own := fields.ByTextName(key); own != nil {
		return table.Get(own), true
	}
	for i := range fields.Len() {
		if inlined := fields.Get(i); Inlined(inlined) {
			if inner := inlined.Message().Fields().ByTextName(key); inner != nil {
				return table.Get(inlined).Message().Get(inner), true
			}
		}
	}
	return value, false
}

// FromData reports whether the training tokens are read from rows instead of sampled, so that they
// can't be stale.
func FromData(config *configv1.RunConfig) bool {
	rows := Traits(config).GetRows()
	return rows != configv1.RowKind_ROW_KIND_UNSPECIFIED && rows != configv1.RowKind_ROW_KIND_PROMPT
}

// Samples reports whether a run samples completions at all. A run that trains on rows does so for
// evaluations with a reward only.
func Samples(config *configv1.RunConfig) bool {
	return !FromData(config) || config.GetEval().GetEverySteps() > 0 && config.GetReward() != nil
}

// External reports whether agents outside of the run sample through the gateway and return the
// rewards.
func External(config *configv1.RunConfig) bool {
	return config.GetEnvironment().GetKind() == "external"
}

// TeachesHeldOut reports whether evaluations compute the loss on held-out rows, without sampling.
func TeachesHeldOut(config *configv1.RunConfig) bool {
	return FromData(config) && config.GetEval().GetEverySteps() > 0 && config.GetReward() == nil
}

// Pairs reports whether a row holds a chosen and a rejected completion.
func Pairs(config *configv1.RunConfig) bool {
	switch Traits(config).GetRows() {
	case configv1.RowKind_ROW_KIND_PAIR:
		return true
	case configv1.RowKind_ROW_KIND_LABELED:
		paired, ok := Setting(config, "paired")
		return ok && paired.Bool()
	}
	return false
}

// GroupSize is the number of trajectories of a complete group: two for a pair, else the samples of
// a prompt.
func GroupSize(config *configv1.RunConfig) uint32 {
	if Pairs(config) {
		return 2
	}
	return config.GetSampling().GetGroupSize()
}

// Generates reports whether the trained weights can answer prompts. Those of a reward model cannot.
func Generates(config *configv1.RunConfig) bool { return !Traits(config).GetScores() }

// DrawBatches is the number of batches that a step may draw until it has one batch of groups whose
// rewards differ (dynamic sampling); 0 without dynamic sampling.
func DrawBatches(config *configv1.RunConfig) uint32 {
	if on, ok := Setting(config, "dynamic_sampling"); ok && on.Bool() {
		return config.GetSampling().GetRefillRounds()
	}
	return 0
}

// Title is the name of the algorithm in papers.
func Title(config *configv1.RunConfig) string { return Traits(config).GetTitle() }

func chosen(config *configv1.RunConfig) protoreflect.FieldDescriptor {
	message := config.GetAlgorithm().ProtoReflect()
	return message.WhichOneof(message.Descriptor().Oneofs().ByName("kind"))
}
