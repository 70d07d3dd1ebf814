package completions

import (
	"errors"
	"testing"

	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// The error says why completions are missing and what to do.
func TestNoCompletions(t *testing.T) {
	t.Parallel()
	const running, failed, succeeded = runv1.RunState_RUN_STATE_RUNNING, runv1.RunState_RUN_STATE_FAILED, runv1.RunState_RUN_STATE_SUCCEEDED
	rows := &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dpo{}}
	for _, c := range []struct {
		algorithm *configv1.AlgorithmConfig
		state     runv1.RunState
		made, of  uint64
		want      string
	}{
		{nil, running, 0, 0, "run r has no completions: it has not made a step yet; wait for the step; see the progress with `rollout runs show r`"},
		{nil, running, 3, 40, "run r has no completions of step 40: its last step is 3; wait for the step; see the progress with `rollout runs show r`"},
		{nil, failed, 0, 0, "run r has no completions: it has not made a step yet; resume it with `rollout run --resume r`"},
		{nil, succeeded, 3, 4, "run r has no completions of step 4: its last step is 3; choose one of its steps"},
		{nil, running, 3, 2, "run r has stored no completions of step 2; see `per_step` and `every_steps` of [completions] in its configuration"},
		{rows, running, 0, 0, "run r has no completions: DPO trains on data and does not sample; sample answers with `rollout infer batch --run r --output answers.jsonl`"},
	} {
		run := &runv1.Run{RunId: "r", State: c.state, Step: c.made, Plan: &planv1.Plan{Config: &configv1.RunConfig{Algorithm: c.algorithm}}}
		var typed *exit.Error
		if err := noCompletions(run, c.of); !errors.As(err, &typed) || typed.Code != exit.NoInput || typed.Error()+"; "+typed.Fix != c.want {
			t.Errorf("got  %v; %s\nwant %s", err, typed.Fix, c.want)
		}
	}
}
