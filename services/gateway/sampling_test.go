package gateway_test

import (
	"net/http"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// A session that gets its task when it is closed is refused then: until then, it may be an
// evaluation.
func TestSamplingOfASessionWithoutAGroup(t *testing.T) {
	t.Parallel()
	a := setup(t, func(c *configv1.RunConfig) {
		c.Sampling.GroupSize, c.Sampling.Temperature = proto.Uint32(1), proto.Float64(1)
		c.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_ReinforcePp{ReinforcePp: &configv1.ReinforcePpConfig{Loss: &configv1.PolicyLossConfig{ImportanceCorrection: proto.String("truncate")}}}}
	})
	a.publish(3)
	greedy := `{"model":"tiny","prompt":[1,2],"temperature":0}`
	for _, name := range []string{"sess-greedy", "sess-failed"} {
		if resp, body := do(t, a.gateway, "POST", "/sessions/"+name+"/v1/completions", greedy, ""); resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", resp.Status, body)
		}
	}
	_, err := a.close(&gateway.Task{SessionId: "sess-greedy"}, 1)
	if rpcerr.Reason(err) != gateway.ReasonSampling || !strings.Contains(err.Error(), "temperature 0 is greedy") || !strings.Contains(rpcerr.Fix(err), "omit temperature") {
		t.Errorf("%v; %s", err, rpcerr.Fix(err))
	}
	// Failures are not trained on, and the refused session took no prompt group.
	failed := &gatewayv1.CloseSessionRequest{SessionId: "sess-failed", Outcome: trajectoryv1.Outcome_OUTCOME_INFRA_FAILED}
	if got, err := a.gateway.CloseSession(t.Context(), failed); err != nil || got.GetEnd().GetKey().GetIndex() != 3 {
		t.Errorf("got %v, %v", got, err)
	}
}

// In a session that is trained on, parameters may differ from those of the run as far as the
// importance weight corrects for that.
func TestSamplingOfATrainedSession(t *testing.T) {
	t.Parallel()
	corrected := func(how string) func(*configv1.RunConfig) {
		return func(c *configv1.RunConfig) {
			c.Sampling.Temperature, c.Sampling.TopP, c.Sampling.TopK = proto.Float64(1), proto.Float64(1), proto.Uint32(0)
			c.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Grpo{Grpo: &configv1.GrpoConfig{Loss: &configv1.PolicyLossConfig{ImportanceCorrection: proto.String(how)}}}}
		}
	}
	truncate, none := setup(t, corrected("truncate")), setup(t, corrected("none"))
	for i, c := range []struct {
		name   string
		run    *agency
		params *inferencev1.SamplingParams
		want   string // parts of the error, separated by " ... "; empty: accepted
	}{
		{"no parameters", none, nil, ""},
		{"no parameters, and the importance weight corrects", truncate, nil, ""},
		{"nothing", none, &inferencev1.SamplingParams{}, ""},
		{"the run's own", none, &inferencev1.SamplingParams{Temperature: proto.Float64(1), TopP: proto.Float64(1), MaxTokens: proto.Uint32(3)}, ""},
		{"corrected", truncate, &inferencev1.SamplingParams{Temperature: proto.Float64(0.7), PresencePenalty: proto.Float64(1)}, ""},
		{"greedy", truncate, &inferencev1.SamplingParams{Temperature: proto.Float64(0)}, "temperature 0 is greedy ... omit temperature: the run's is the default"},
		{"temperature", none, &inferencev1.SamplingParams{Temperature: proto.Float64(0.7)}, "temperature is 0.7 where the run's is 1 ... omit temperature, or set `algorithm.grpo.importance_correction = \"truncate\"`"},
		{"bias", none, &inferencev1.SamplingParams{LogitBias: map[uint32]float64{7: 1}}, "logit_bias is set where the run's is empty ... omit logit_bias"},
	} {
		c.run.publish(uint64(i))
		task := c.run.next()[0]
		stream := &collected{ctx: t.Context()}
		err := c.run.gateway.Complete(&gatewayv1.CompleteRequest{Model: "tiny", SessionId: task.GetSessionId(), Params: c.params, Prompts: []*inferencev1.Prompt{tokens(1, 2)}}, stream)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		message, fix, _ := strings.Cut(c.want, " ... ")
		if rpcerr.Reason(err) != gateway.ReasonSampling || !strings.Contains(err.Error(), message) || !strings.Contains(rpcerr.Fix(err), fix) {
			t.Errorf("%s: %v; %s", c.name, err, rpcerr.Fix(err))
		}
	}
	// Requests outside of the sessions are not trained on, evaluations for example.
	greedy := `{"model":"tiny","prompt":[1,2],"temperature":0}`
	if resp, body := do(t, truncate.gateway, "POST", "/v1/completions", greedy, ""); resp.StatusCode != http.StatusOK {
		t.Errorf("%s: %s", resp.Status, body)
	}
	truncate.publish(90)
	path := "/sessions/" + truncate.next()[0].GetSessionId() + "/v1/completions"
	if resp, body := do(t, truncate.gateway, "POST", path, greedy, ""); resp.StatusCode != http.StatusBadRequest || !strings.Contains(body, `"SAMPLING_NOT_TRAINABLE"`) {
		t.Errorf("%s: %s", resp.Status, body)
	}
}
