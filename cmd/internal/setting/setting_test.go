package setting

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
)

// The lines are TOML: reading them gives the same configuration.
func TestTOMLIsReadAgain(t *testing.T) {
	t.Parallel()
	reader, err := config.NewReader()
	if err != nil {
		t.Fatal(err)
	}
	const source = `name = "sums"
model.path = "models/a \"quoted\" name"
data.train = "train.jsonl"
sampling.group_size = 8
sampling.stop = [";", "\n"]
algorithm.dapo.clip_high = 1.0
train.steps = 10
train.learning_rate = 1e-6
train.freeze = ["model.layers.[0-3].*"]
[reward.composite.right]
plugin = "reward.py:exact"
[reward.composite.short]
expression = 'size(completion) < 10 ? 1.0 : 0.0'
weight = 0.5
`
	read := func(text string) *configv1.RunConfig {
		t.Helper()
		got := reader.Read(&planv1.ConfigSource{Toml: []byte(text), File: "run.toml"})
		for _, p := range got.Sorted() {
			if !strings.Contains(p.GetMessage(), "has no effect") { // of a default that is written out
				t.Errorf("%s:%d %s", text, p.GetLine(), p.GetMessage())
			}
		}
		return got.Config
	}
	first := read(source)
	text := TOML(first)
	if second := read(text); !proto.Equal(first, second) {
		t.Errorf("%s\nis\n%v\nbut was\n%v", text, second, first)
	}
	if got := Of(&configv1.RunConfig{Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Sft{Sft: &configv1.SftConfig{}}}})["algorithm.sft"]; got != "{}" {
		t.Errorf("a table without keys is %q", got)
	}
}
