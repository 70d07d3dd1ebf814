package planner

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

const walk = `class Walk:
    def __init__(self, length=3):
        self.length = length

    def reset(self, *, seed=None, options=None):
        return OBSERVATION, {}

    def step(self, action):
        return ANSWER
`

// The plan makes the environment of a policy, plays a step, compares both, and pins their files.
func TestPlanComparesThePolicyWithItsEnvironment(t *testing.T) {
	t.Parallel()
	s := server(t)
	text := strings.NewReplacer("[reward]\nplugin = \"reward.py:exact\"\n[algorithm.grpo]", "[algorithm.ppo]", "max_tokens = 6\n", "").Replace(configText)
	plan := func(class string, policy string, set ...string) *planv1.CreatePlanResponse {
		dir := project(t, "")
		for name, text := range map[string]string{"walk.py": class, "model/config.json": policy, "model/policy.py": "", "train.jsonl": "{\"seed\": 7}\n"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Remove(filepath.Join(dir, "model/tokenizer.json")); err != nil {
			t.Fatal(err)
		}
		response, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{
			Toml: []byte(text), File: "run.toml", BaseDir: dir, Set: append([]string{`multistep.environment="walk.py:Walk"`, "train.groups_per_step=1"}, set...),
		}})
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	class := func(observation, answer string) string {
		return strings.NewReplacer("OBSERVATION", observation, "ANSWER", answer).Replace(walk)
	}
	right := class("[0.0, 1.0]", "[0.0, 1.0], 1.0, False, False, {}")
	policy := `{"model_type": "rollout_actor_critic", "observation_size": 2, "action_size": 2, "chunk": 2}`
	good := plan(right, policy, "multistep.chunk=2", "multistep.args={length=4}")
	if len(good.GetProblems()) > 0 {
		t.Fatal(good.GetProblems())
	}
	var paths []string
	for _, in := range good.GetPlan().GetInputs() {
		if role := in.GetRole(); role == planv1.InputRole_INPUT_ROLE_ENVIRONMENT || role == planv1.InputRole_INPUT_ROLE_MODEL {
			paths = append(paths, in.GetPath())
		}
	}
	if want := []string{"model/config.json", "model/model.safetensors", "model/policy.py", "walk.py"}; !slices.Equal(paths, want) {
		t.Errorf("inputs %q, not %q", paths, want)
	}
	if ppo := good.GetPlan().GetConfig().GetAlgorithm().GetPpo(); ppo.GetGamma() != 0.99 || ppo.GetLoss().GetKlCoefficient() != 0 || ppo.GetValueClip() != 0 {
		t.Errorf("defaults %v", ppo)
	}
	for _, c := range []struct {
		class, policy, set, want, field string
	}{
		{right, policy, "multistep.chunk=1", "the policy chooses 2 actions at once, and `multistep.chunk` is 1", "model.path"},
		{right, policy, `multistep.reward_type="action_level"`, "the policy has 1 values of a chunk, and `multistep.reward_type` needs one of each of the 2 actions", "model.path"},
		{class("[0.0]", ""), strings.Replace(policy, "actor_critic", "token_actor", 1), "", "the policy takes observations of shape [2], and the environment returns [1]", "model.path"},
		{class("[0.0]", ""), policy, "", "the policy takes observations of shape [2], and the environment returns [1]", "model.path"},
		{class("[0.0, 1/0]", ""), policy, "", "`reset` of walk.py:Walk raised ZeroDivisionError: division by zero", ""},
		{class("'left'", ""), policy, "", "an observation of walk.py:Walk has str, not numbers", "multistep.environment"},
		{class("[0.0, 1.0]", "[0.0, 1.0], None, False, False, {}"), policy, "", "`step` of walk.py:Walk returned the reward None", "multistep.environment"},
		{class("[0.0, 1.0]", "[0.0, 1.0], 1.0, False"), policy, "", "`step` of walk.py:Walk returned a tuple of 3", "multistep.environment"},
		{right, policy, "multistep.args={width=1}", "`Walk(width=1)`: got an unexpected keyword argument 'width'", ""},
		{"class Run:\n    pass\n", policy, "", "no class `Walk` is defined in walk.py", ""},
		{right, policy, `multistep.environment="run.py:Walk"`, "the file run.py does not exist", "multistep.environment"},
		{right, policy, `multistep.environment="Nothing-v0"`, "Nothing-v0", "multistep.environment"},
	} {
		set := []string{"multistep.chunk=2"}
		if c.set != "" {
			set = append(set, c.set)
		}
		list := plan(c.class, c.policy, set...).GetProblems()
		if len(list) != 1 || !strings.Contains(list[0].GetMessage(), c.want) || list[0].GetFix() == "" || c.field != "" && list[0].GetField() != c.field {
			t.Errorf("%s: got %v, want %q at %q", fmt.Sprint(c.set, c.class), list, c.want, c.field)
		}
	}
}
