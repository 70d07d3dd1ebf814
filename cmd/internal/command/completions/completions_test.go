package completions

import (
	"errors"
	"testing"

	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Why a run has no completions decides what to do about it.
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
		{nil, running, 0, 0, "run r has no completions: it has made no step yet; wait for it: `rollout runs show r` tells how far the run is"},
		{nil, running, 3, 40, "run r has no completions of step 40: its last step is 3; wait for it: `rollout runs show r` tells how far the run is"},
		{nil, failed, 0, 0, "run r has no completions: it has made no step yet; `rollout run --resume r` goes on with it"},
		{nil, succeeded, 3, 4, "run r has no completions of step 4: its last step is 3; name one of its steps"},
		{nil, running, 3, 2, "run r keeps no completions of step 2; see `per_step` and `every_steps` of [completions] in its configuration"},
		{rows, running, 0, 0, "run r has no completions: DPO trains on rows and samples none; `rollout report r` shows the held-out answers, where [eval] asks for some"},
	} {
		run := &runv1.Run{RunId: "r", State: c.state, Step: c.made, Plan: &planv1.Plan{Config: &configv1.RunConfig{Algorithm: c.algorithm}}}
		var typed *exit.Error
		if err := noCompletions(run, c.of); !errors.As(err, &typed) || typed.Code != exit.NoInput || typed.Error()+"; "+typed.Fix != c.want {
			t.Errorf("got  %v; %s\nwant %s", err, typed.Fix, c.want)
		}
	}
}
