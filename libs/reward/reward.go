// Package reward lists what scores the completions of a run.
package reward

import (
	"maps"
	"slices"
	"strings"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Part is one reward of a run: the only one, or one of a sum.
type Part struct {
	Name       string                       // "" for the only one
	Field      string                       // table that sets it, such as "reward.composite.format"
	Plugin     string                       // "" for other kinds
	Expression string                       // "" for other kinds
	Model      *configv1.ScoringModelConfig // nil for other kinds
	Timeout    float64
	Sandbox    bool // a plugin that runs in a sandbox
}

// Parts are the rewards of a run by name, in the order in which workers sum them; empty where
// nothing is scored.
func Parts(config *configv1.RunConfig) []Part {
	reward := config.GetReward()
	if reward == nil {
		return nil
	}
	if len(reward.GetComposite()) == 0 {
		return []Part{{Field: "reward", Plugin: reward.GetPlugin(), Expression: reward.GetExpression(), Model: reward.GetModel(), Timeout: reward.GetTimeoutSeconds(), Sandbox: reward.GetSandbox() && reward.Plugin != nil}}
	}
	var parts []Part
	for _, name := range slices.Sorted(maps.Keys(reward.GetComposite())) {
		part := reward.GetComposite()[name]
		timeout := reward.GetTimeoutSeconds()
		if part.TimeoutSeconds != nil {
			timeout = part.GetTimeoutSeconds()
		}
		sandbox := reward.GetSandbox()
		if part.Sandbox != nil {
			sandbox = part.GetSandbox()
		}
		parts = append(parts, Part{
			Name: name, Field: "reward.composite." + name, Plugin: part.GetPlugin(), Expression: part.GetExpression(), Model: part.GetModel(), Timeout: timeout,
			Sandbox: sandbox && part.Plugin != nil,
		})
	}
	return parts
}

// Models are the parts that a separate worker serves: worker `reward-N` has the N-th.
func Models(config *configv1.RunConfig) []Part {
	return slices.DeleteFunc(Parts(config), func(part Part) bool { return part.Model == nil })
}

// Scores reports whether a class that a model's config.json names under `architectures` scores
// completions: it writes none.
func Scores(architecture string) bool {
	return strings.HasSuffix(architecture, "ForSequenceClassification")
}
