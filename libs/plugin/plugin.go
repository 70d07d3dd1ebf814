// Package plugin is the Go SDK of rollout.plugin.v1: a program with rewards, environments, tools,
// and data sources, which runs next to the workers of a run.
//
//	func main() { plugin.Main("1.0.0", plugin.Reward("short", short)) }
//
//	func short(_ context.Context, samples []plugin.Sample) ([]plugin.Score, error) {
//		scores := make([]plugin.Score, len(samples))
//		for i, sample := range samples {
//			scores[i].Reward = 1 / float64(1+len(sample.Completion))
//		}
//		return scores, nil
//	}
//
// A manifest names the program, and a configuration the manifest (docs/plugins.md). Functions are
// called concurrently. An error or a panic fails the call with a reason; it never becomes a reward
// of 0.
package plugin

import (
	"context"
	"encoding/json"
	"fmt"

	pluginv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plugin/v1"
)

// SchemaVersion is the version of rollout.plugin.v1 that this package speaks.
const SchemaVersion = 1

// Plugin is one plugin of a program; Reward, Tool, Environment, Evaluation, and DataSource make
// one.
type Plugin struct {
	info        *pluginv1.PluginInfo
	reward      RewardFunc
	tool        toolFunc
	rows        RowsFunc
	environment *episodes
}

// Sample is one completion to score. Row is the row of the data set, a JSON object. TokenIDs are
// those of the completion, with its end token.
type Sample struct {
	Prompt, Completion string
	TokenIDs           []int32
	Row                json.RawMessage
}

// Score is the score of one sample. Every number is finite. TokenRewards is empty or has one number
// for each of the sample's TokenIDs.
type Score struct {
	Reward       float64
	Metrics      map[string]float64
	TokenRewards []float64
	Steps        []Step
}

// Step is the reward of the characters (Unicode code points) [Start, End) of a completion. Steps
// are in ascending order and do not overlap.
type Step struct {
	Start, End uint32
	Reward     float64
}

// RewardFunc scores samples: one score for each, in order.
type RewardFunc func(ctx context.Context, samples []Sample) ([]Score, error)

// Reward returns a reward with this name, which is that of its manifest.
func Reward(name string, score RewardFunc) Plugin {
	return Plugin{info: &pluginv1.PluginInfo{Kind: pluginv1.PluginKind_PLUGIN_KIND_REWARD, Name: name}, reward: score}
}

// Evaluation returns an evaluation with this name. It scores answers like a reward.
func Evaluation(name string, score RewardFunc) Plugin {
	return Plugin{info: &pluginv1.PluginInfo{Kind: pluginv1.PluginKind_PLUGIN_KIND_EVALUATION, Name: name}, reward: score}
}

// RowsFunc returns at most limit rows of a split, JSON objects, from the index offset on. Fewer
// than limit rows are the last ones. The same arguments must always return the same rows.
type RowsFunc func(ctx context.Context, split string, offset uint64, limit int) ([]json.RawMessage, error)

// DataSource returns a data source with this name.
func DataSource(name string, rows RowsFunc) Plugin {
	return Plugin{info: &pluginv1.PluginInfo{Kind: pluginv1.PluginKind_PLUGIN_KIND_DATA_SOURCE, Name: name}, rows: rows}
}

// ToolCall is a call of a tool by the policy. Task and Sample name its episode.
type ToolCall struct {
	ID     string
	Task   string
	Sample uint32
}

type toolFunc func(ctx context.Context, call ToolCall, arguments []byte) (string, error)

// Tool returns a tool with this name. parameters is the JSON schema of its arguments, an object
// that is decoded into A; its `required` arguments must be there. The policy reads the text, or the
// text of an error; an error made by Infrastructure ends the episode as INFRA_FAILED instead.
func Tool[A any](name, description, parameters string, call func(ctx context.Context, call ToolCall, arguments A) (string, error)) Plugin {
	return Plugin{
		info: &pluginv1.PluginInfo{Kind: pluginv1.PluginKind_PLUGIN_KIND_TOOL, Name: name, Description: description, ParametersJson: parameters},
		tool: func(ctx context.Context, made ToolCall, data []byte) (string, error) {
			var arguments A
			if err := decode(data, parameters, &arguments); err != nil {
				return "", err
			}
			return call(ctx, made, arguments)
		},
	}
}

func decode(data []byte, parameters string, into any) error {
	if len(data) == 0 {
		data = []byte("{}")
	}
	given := map[string]json.RawMessage{}
	if err := json.Unmarshal(data, &given); err != nil {
		return fmt.Errorf("the arguments are not a JSON object: %w", err)
	}
	var schema struct{ Required []string }
	if err := json.Unmarshal([]byte(parameters), &schema); err != nil {
		return fmt.Errorf("read the schema of the arguments: %w", err)
	}
	for _, name := range schema.Required {
		if _, ok := given[name]; !ok {
			return fmt.Errorf("missing argument %q", name)
		}
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("the arguments do not fit the tool: %w", err)
	}
	return nil
}

// Error is a failure with a machine-readable reason, such as SIMULATOR_DOWN, and what to do.
type Error struct {
	Reason, Message, Fix string

	infrastructure bool
}

func (e *Error) Error() string { return e.Message }

// Infrastructure is the error of a tool that failed for another reason than the policy's call.
func Infrastructure(reason, message string) error {
	return &Error{Reason: reason, Message: message, infrastructure: true}
}
