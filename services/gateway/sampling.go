package gateway

import (
	"context"
	"fmt"

	"github.com/rollout-rl/rollout/libs/algorithm"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// checkSampling refuses parameters of a request whose samples the run could not train on, because
// its probabilities are of the run's own parameters. Requests in sessions without a task are free,
// but if such a session is closed with a result, checkSampled refuses it.
func (a *agents) checkSampling(ctx context.Context, session *conversation, params *inferencev1.SamplingParams) error {
	if session.task == nil {
		session.params = params // it may get a task when it is closed
		return nil
	}
	run, err := a.run(ctx, session.run)
	if err != nil {
		return err
	}
	if problem, fix := untrainable(run.config, params); problem != "" {
		return ErrSampling.WithMessage("session %s is trained on, and %s", session.id, problem).Fix(fix)
	}
	return nil
}

// checkSampled is checkSampling for a session that gets its task when it is closed.
func checkSampled(config *configv1.RunConfig, session *Session, name string) error {
	for _, segment := range session.GetSegments() {
		if problem, fix := untrainable(config, segment.GetParams()); problem != "" {
			return ErrSampling.WithMessage("request %s of session %s can't be trained on: %s", segment.GetRequestId(), name, problem).
				Fix(fix + "; close this session with the outcome ABORTED")
		}
	}
	return nil
}

// untrainable returns why samples with these parameters can't be trained on, and what to do; empty
// if they can. nil are the run's own. Engines report the probability that a token was sampled with,
// and the importance weight corrects for what differs from the run. It can't correct a greedy
// choice, and without it nothing may differ.
func untrainable(config *configv1.RunConfig, params *inferencev1.SamplingParams) (problem, fix string) {
	if params == nil {
		return "", ""
	}
	const key = "importance_correction"
	correction, ok := algorithm.Setting(config, key)
	if !ok { // no loss of the algorithm uses the probabilities
		return "", ""
	}
	own := config.GetSampling()
	if params.Temperature != nil && params.GetTemperature() == 0 && own.GetTemperature() > 0 {
		return fmt.Sprintf("temperature 0 is greedy: all samples of a group would be the same, and the run's temperature is %g", own.GetTemperature()),
			"omit temperature: the run's is the default"
	}
	if correction.String() != "none" {
		return "", ""
	}
	for _, p := range []struct {
		name      string
		differs   bool
		value, is any
	}{
		{"temperature", params.Temperature != nil && params.GetTemperature() != own.GetTemperature(), params.GetTemperature(), own.GetTemperature()},
		{"top_p", params.TopP != nil && params.GetTopP() != own.GetTopP(), params.GetTopP(), own.GetTopP()},
		{"top_k", params.TopK != nil && params.GetTopK() != own.GetTopK(), params.GetTopK(), own.GetTopK()},
		{"min_p", params.MinP != nil && params.GetMinP() != own.GetMinP(), params.GetMinP(), own.GetMinP()},
		{"repetition_penalty", params.RepetitionPenalty != nil && params.GetRepetitionPenalty() != 1, params.GetRepetitionPenalty(), 1},
		{"presence_penalty", params.GetPresencePenalty() != 0, params.GetPresencePenalty(), 0},
		{"frequency_penalty", params.GetFrequencyPenalty() != 0, params.GetFrequencyPenalty(), 0},
		{"logit_bias", len(params.GetLogitBias()) > 0, "set", "empty"},
		{"min_tokens", params.GetMinTokens() > 0, params.GetMinTokens(), 0},
		{"ignore_eos", params.GetIgnoreEos(), true, false},
		{"response_format", params.GetConstraint() != nil, "set", "empty"},
	} {
		if p.differs {
			return fmt.Sprintf("%s is %v where the run's is %v: `%s = \"none\"` corrects no difference", p.name, p.value, p.is, key),
				fmt.Sprintf("omit %s, or set `algorithm.%s.%s = \"truncate\"` in the configuration of the run", p.name, algorithm.Name(config), key)
		}
	}
	return "", ""
}
