package infer

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
)

// configChanges are the flags that change a configuration; nil leaves a value as it is.
type configChanges struct {
	Samples, MaxTokens, TopK    *uint32
	Temperature, TopP, MinP     *float64
	Stop                        []string
	Seed                        *uint64
	PromptField, Reward         *string // Reward: file.py:function
	ChatTemplate                *bool
	Slots, MaxModelLen, Threads *uint32
}

// bare has the required fields that inference does not use.
const bare = "name = \"infer\"\nmodel.path = \"model\"\ndata.train = \"data\"\nalgorithm.sft = {}\ntrain.steps = 1\ntrain.groups_per_step = 1\n"

// readConfig reads a configuration; without a file it returns the defaults.
func readConfig(source *planv1.ConfigSource) (*configv1.RunConfig, []*planv1.Problem, error) {
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

// evaluating returns the configuration of a run with the sampling settings of its evaluations:
// those of training with another temperature.
func evaluating(given *configv1.RunConfig) *configv1.RunConfig {
	out := proto.CloneOf(given)
	if out.Sampling == nil {
		out.Sampling = &configv1.SamplingConfig{}
	}
	out.Sampling.Temperature = proto.Float64(given.GetEval().GetTemperature())
	return out
}

// sampling are the settings that a completion depends on.
type sampling struct {
	Samples     uint32   `json:"samples"`
	Temperature float64  `json:"temperature"`
	TopP        float64  `json:"top_p"`
	TopK        uint32   `json:"top_k"`
	MinP        float64  `json:"min_p"`
	MaxTokens   uint32   `json:"max_tokens"`
	Stop        []string `json:"stop"`
	Seed        uint64   `json:"seed"`
}

func samplingOf(c *configv1.RunConfig) sampling {
	s := c.GetSampling()
	return sampling{s.GetGroupSize(), s.GetTemperature(), s.GetTopP(), s.GetTopK(), s.GetMinP(), s.GetMaxTokens(), append([]string{}, s.GetStop()...), c.GetSeed()}
}

// String lists the settings; filters that are off are left out.
func (s sampling) String() string {
	parts := []string{fmt.Sprintf("%d per row", s.Samples), "temperature " + output.Number(s.Temperature)}
	if s.Temperature == 0 {
		parts[1] += " (greedy)"
	}
	if s.TopP != 1 {
		parts = append(parts, "top_p "+output.Number(s.TopP))
	}
	if s.TopK != 0 {
		parts = append(parts, fmt.Sprintf("top_k %d", s.TopK))
	}
	if s.MinP != 0 {
		parts = append(parts, "min_p "+output.Number(s.MinP))
	}
	parts = append(parts, fmt.Sprintf("at most %s tokens", output.Count(s.MaxTokens)))
	for _, stop := range s.Stop {
		parts = append(parts, fmt.Sprintf("stop %q", stop))
	}
	return strings.Join(append(parts, fmt.Sprintf("seed %d", s.Seed)), ", ")
}

// apply applies the changes to a configuration and validates it.
func (c configChanges) apply(given *configv1.RunConfig) (*configv1.RunConfig, error) {
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
	return table == "sampling" || table == "engine" || table == "reward" || table == "seed" || field == "data.prompt_field"
}
