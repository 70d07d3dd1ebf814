package planner

import (
	"fmt"
	"math"
	"strings"

	"github.com/rollout-rl/rollout/libs/algorithm"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
)

// shownSetting is a key whose value a plan shows. `*` is the name of the algorithm; keys that the
// algorithm lacks are left out.
type shownSetting struct {
	key   string
	shown func(*configv1.RunConfig) bool // nil: always
	note  func(c *configv1.RunConfig, rows uint64) string
}

var shownSettings = []shownSetting{
	{"train.epochs", nil, passes},
	{"train.steps", nil, nil},
	{"train.groups_per_step", nil, nil},
	{"sampling.group_size", onPolicy, func(c *configv1.RunConfig, _ uint64) string {
		return fmt.Sprintf("%d samples per step", uint64(c.GetTrain().GetGroupsPerStep())*uint64(c.GetSampling().GetGroupSize()))
	}},
	{"algorithm.*.minibatches", nil, nil},
	{"algorithm.*.epochs", nil, nil},
	{"train.learning_rate", nil, nil},
	{"train.schedule", nil, nil},
	{"train.warmup_steps", func(c *configv1.RunConfig) bool { return c.GetTrain().GetWarmupSteps() > 0 }, nil},
	{"algorithm.*.kl_coefficient", nil, nil},
	{"algorithm.*.beta", nil, nil},
	{"lora.rank", adapted, nil},
	{"lora.alpha", adapted, nil},
	{"lora.targets", adapted, func(c *configv1.RunConfig, _ uint64) string {
		if len(c.GetLora().GetTargets()) > 0 {
			return ""
		}
		return "all linear layers except the head"
	}},
	{"lora", func(c *configv1.RunConfig) bool { return !adapted(c) }, func(*configv1.RunConfig, uint64) string { return "all weights are trained" }},
	{"model.dtype", nil, nil},
	{"engine.max_model_len", speaks, nil},
	{"sampling.max_tokens", func(c *configv1.RunConfig) bool { return algorithm.Samples(c) && speaks(c) }, nil},
	{"sampling.temperature", func(c *configv1.RunConfig) bool { return onPolicy(c) && speaks(c) }, nil},
	{"sampling.top_p", func(c *configv1.RunConfig) bool { return onPolicy(c) && speaks(c) }, nil},
	{"multistep.environment", nil, nil},
	{"multistep.environments", nil, nil},
	{"multistep.chunk", nil, nil},
	{"multistep.max_steps", nil, nil},
	{"eval.temperature", func(c *configv1.RunConfig) bool { return c.GetEval().GetEverySteps() > 0 && algorithm.Rewarded(c) }, nil},
}

func onPolicy(c *configv1.RunConfig) bool { return !algorithm.FromData(c) }

// speaks reports whether a language model is trained.
func speaks(c *configv1.RunConfig) bool { return c.GetMultistep() == nil }

func adapted(c *configv1.RunConfig) bool { return c.GetLora() != nil }

// passes describes the data that the epochs count.
func passes(c *configv1.RunConfig, rows uint64) string {
	note := fmt.Sprintf("%d rows, %d per step", rows, c.GetTrain().GetGroupsPerStep())
	if draws := algorithm.DrawBatches(c); draws > 1 {
		note += fmt.Sprintf(", at most %d with dynamic sampling", uint64(c.GetTrain().GetGroupsPerStep())*uint64(draws))
	}
	return note
}

// settings are the values of the keys that decide most about the result of a run, with their
// origin.
func settings(reading *config.Reading, rows uint64) []*planv1.Setting {
	var out []*planv1.Setting
	c := reading.Config
	for _, shown := range shownSettings {
		path := strings.Replace(shown.key, "*", algorithm.Name(c), 1)
		setting := &planv1.Setting{Key: path, Value: reading.Value(path), Origin: planv1.SettingOrigin_SETTING_ORIGIN_DEFAULT}
		switch {
		case path == "train.epochs" && c.GetTrain().Epochs == nil:
			epochs := math.Round(epochsOf(c.GetTrain(), rows)*1000) / 1000
			setting.Value, setting.Origin = config.Decimal(epochs), planv1.SettingOrigin_SETTING_ORIGIN_COMPUTED
		case path == "train.steps" && c.GetTrain().Epochs != nil:
			setting.Origin = planv1.SettingOrigin_SETTING_ORIGIN_COMPUTED
		case reading.Wrote(path):
			setting.Origin = planv1.SettingOrigin_SETTING_ORIGIN_SET
		}
		if shown.shown != nil && !shown.shown(c) || setting.Value == "" && path != "lora" {
			continue
		}
		if shown.note != nil {
			setting.Note = shown.note(c, rows)
		}
		out = append(out, setting)
	}
	return out
}
