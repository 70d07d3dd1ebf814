package completions

import (
	"errors"
	"strings"
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

// A conversation is shown turn by turn, with the roles of the messages that the policy did not
// sample.
func TestTurns(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"42":                    `"42"`,
		"":                      `""`,
		"a\n[b] c":              `"a\n[b] c"`,
		"\n[user] guess 1-5:\n": `user "guess 1-5:"`,
		"3\n[user] lower:\n[assistant] 1\n[user] higher:\n[assistant] 2": `"3" | user "lower:" | "1" | user "higher:" | "2"`,
		"call\n[tool] two\nlines\n\n[user] and?\n[assistant] ok\n":       `"call" | tool "two\nlines" | user "and?" | "ok\n"`,
	} {
		if got := strings.Join(shown(turns(text)), " | "); got != want {
			t.Errorf("%q: got %s, want %s", text, got, want)
		}
	}
}
