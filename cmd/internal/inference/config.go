// Package inference makes the configurations of commands that sample without a run that trains.
package inference

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
)

// Changes are the flags that change a configuration; nil leaves a value as it is.
type Changes struct {
	Samples, MaxTokens, TopK    *uint32
	Temperature, TopP, MinP     *float64
	Stop                        []string
	Seed                        *uint64
	PromptField, Reward         *string // Reward: file.py:function
	ChatTemplate                *bool
	Slots, MaxModelLen, Threads *uint32
	Engine, Python, Dtype       *string
	Workers                     *uint32
}

// bare has the required fields that inference does not use.
const bare = "name = \"infer\"\nmodel.path = \"model\"\ndata.train = \"data\"\nalgorithm.sft = {}\ntrain.steps = 1\ntrain.groups_per_step = 1\n"

// ReadConfig reads a configuration; without a file it returns the defaults.
func ReadConfig(source *planv1.ConfigSource) (*configv1.RunConfig, []*planv1.Problem, error) {
	reader, err := config.NewReader()
	if err != nil {
		return nil, nil, err
	}
	if source.GetFile() == "" {
		source.Toml = []byte(bare)
	}
	reading := reader.Read(source)
	return reading.Config, reading.Sorted(), nil
}

// Evaluating returns the configuration of a run with the sampling settings of its evaluations:
// those of training with another temperature.
func Evaluating(given *configv1.RunConfig) *configv1.RunConfig {
	out := proto.CloneOf(given)
	if out.Sampling == nil {
		out.Sampling = &configv1.SamplingConfig{}
	}
	out.Sampling.Temperature = proto.Float64(given.GetEval().GetTemperature())
	return out
}

// Apply applies the changes to a configuration and validates it.
func (c Changes) Apply(given *configv1.RunConfig) (*configv1.RunConfig, error) {
	out := proto.CloneOf(given)
	if out.Sampling == nil {
		out.Sampling = &configv1.SamplingConfig{}
	}
	if out.Engine == nil {
		out.Engine = &configv1.EngineConfig{}
	}
	s, e := out.Sampling, out.Engine
	set(&s.GroupSize, c.Samples)
	set(&s.MaxTokens, c.MaxTokens)
	set(&s.TopK, c.TopK)
	set(&s.Temperature, c.Temperature)
	set(&s.TopP, c.TopP)
	set(&s.MinP, c.MinP)
	set(&out.Seed, c.Seed)
	set(&out.Data.PromptField, c.PromptField)
	set(&out.Model.ChatTemplate, c.ChatTemplate)
	set(&e.Slots, c.Slots)
	set(&e.MaxModelLen, c.MaxModelLen)
	set(&e.Threads, c.Threads)
	set(&e.Kind, c.Engine)
	set(&e.Python, c.Python)
	set(&e.Workers, c.Workers)
	set(&out.Model.Dtype, c.Dtype)
	if c.Stop != nil {
		s.Stop = c.Stop
	}
	if c.Reward != nil {
		out.Reward = nil
		if *c.Reward != "" {
			out.Reward = &configv1.RewardConfig{Plugin: c.Reward}
		}
	}
	reader, err := config.NewReader()
	if err != nil {
		return nil, err
	}
	reading := reader.Again(out)
	for _, p := range reading.Sorted() { // other rules are for training only
		if field, message := p.GetField(), p.GetMessage(); concerns(field) {
			return nil, exit.New(exit.Usage, p.GetFix(), "%s", strings.TrimSuffix(message, ", got "))
		}
	}
	out = reading.Config
	if tokens, longest := out.GetSampling().GetMaxTokens(), out.GetEngine().GetMaxModelLen(); tokens >= longest {
		return nil, exit.New(exit.Usage, fmt.Sprintf("lower --max-tokens below %d, or raise --max-model-len", longest),
			"%d new tokens leave no room for a prompt in a context of %d", tokens, longest)
	}
	return out, nil
}

func set[T any](field **T, value *T) {
	if value != nil {
		*field = value
	}
}

// concerns reports whether inference uses a field.
func concerns(field string) bool {
	switch field {
	case "", "sampling.group_size": // the rules for group_size depend on the algorithm
		return false
	}
	table, _, _ := strings.Cut(field, ".")
	return table == "sampling" || table == "engine" || table == "reward" || table == "seed" || field == "data.prompt_field" || field == "model.dtype" || field == "model.chat_family"
}
