package export

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/report"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// The card names the base model of the hub, and no folder of this machine.
func TestTheCardNamesTheBaseModel(t *testing.T) {
	t.Parallel()
	for path, revision := range map[string]string{"Qwen/Qwen3-0.6B@main": "0123", "models/tiny": ""} {
		data := &report.Data{Run: &live.Run{}}
		data.Run.Update(&runv1.RunStatus{Run: &runv1.Run{RunId: "run-1", Plan: &planv1.Plan{
			Config: &configv1.RunConfig{
				Model:     &configv1.ModelConfig{Path: proto.String(path)},
				Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_RewardModel{RewardModel: &configv1.RewardModelConfig{}}},
			},
			Inputs: []*planv1.Input{{Role: planv1.InputRole_INPUT_ROLE_MODEL, Path: path + "/config.json", Revision: revision}},
		}}})
		card, err := cardOf(&snapshotv1.Snapshot{RunId: "run-1"}, data, "weights")
		if err != nil {
			t.Fatal(err)
		}
		head, _, _ := strings.Cut(strings.TrimPrefix(string(card), "---\n"), "---\n")
		if named := strings.Contains(head, "base_model: Qwen/Qwen3-0.6B\n"); named != (revision != "") || strings.Contains(head, "models/tiny") {
			t.Errorf("%s: %s", path, card)
		}
		if !strings.Contains(head, "pipeline_tag: text-classification\n") {
			t.Errorf("a reward model: %s", head)
		}
	}
}
