package export

import (
	"testing"

	"google.golang.org/protobuf/proto"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

func TestExportTakesTheSettingsOfTheRun(t *testing.T) {
	t.Parallel()
	configured := &configv1.SinksConfig{
		Wandb: &configv1.WandbConfig{Project: proto.String("mine"), Entity: proto.String("us"), Mode: proto.String("online")}, Tensorboard: &configv1.TensorboardConfig{},
	}
	got, err := (&metricsFlags{}).sinks(configured)
	if err != nil || got.GetWandb().GetProject() != "mine" || got.GetWandb().GetEntity() != "us" || got.GetWandb().GetMode() != "online" || got.GetTensorboard() == nil || got.GetMlflow() != nil {
		t.Errorf("%v, %v", got, err)
	}
	got, err = (&metricsFlags{to: []string{"mlflow"}, project: "other", trackingURI: "http://host"}).sinks(configured)
	if err != nil || got.GetMlflow().GetExperiment() != "other" || got.GetMlflow().GetTrackingUri() != "http://host" || got.GetWandb() != nil {
		t.Errorf("%v, %v", got, err)
	}
}
