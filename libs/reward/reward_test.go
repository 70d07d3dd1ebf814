package reward_test

import (
	"reflect"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/reward"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

func TestParts(t *testing.T) {
	t.Parallel()
	liked := &configv1.ScoringModelConfig{Path: proto.String("models/liked")}
	one := &configv1.RunConfig{Reward: &configv1.RewardConfig{Plugin: proto.String("reward.py:f"), TimeoutSeconds: proto.Float64(3), Sandbox: proto.Bool(true)}}
	several := &configv1.RunConfig{Reward: &configv1.RewardConfig{TimeoutSeconds: proto.Float64(3), Sandbox: proto.Bool(true), Composite: map[string]*configv1.RewardPartConfig{
		"judge":  {Plugin: proto.String("judge.py:f"), Sandbox: proto.Bool(false)},
		"right":  {Plugin: proto.String("reward.py:f"), TimeoutSeconds: proto.Float64(9)},
		"format": {Expression: proto.String("1.0")},
		"liked":  {Model: liked},
	}}}
	for name, c := range map[string]struct {
		config *configv1.RunConfig
		want   []reward.Part
	}{
		"none": {&configv1.RunConfig{}, nil},
		"one":  {one, []reward.Part{{Field: "reward", Plugin: "reward.py:f", Timeout: 3, Sandbox: true}}},
		"several": {several, []reward.Part{
			{Name: "format", Field: "reward.composite.format", Expression: "1.0", Timeout: 3},
			{Name: "judge", Field: "reward.composite.judge", Plugin: "judge.py:f", Timeout: 3},
			{Name: "liked", Field: "reward.composite.liked", Model: liked, Timeout: 3},
			{Name: "right", Field: "reward.composite.right", Plugin: "reward.py:f", Timeout: 9, Sandbox: true},
		}},
	} {
		if got := reward.Parts(c.config); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
		for _, part := range reward.Models(c.config) {
			if part.Name != "liked" {
				t.Errorf("%s is served by no worker", part.Name)
			}
		}
	}
}
