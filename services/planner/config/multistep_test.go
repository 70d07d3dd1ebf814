package config

import (
	"strings"
	"testing"
)

// What a policy that acts for many steps can't have is one problem each, with a fix.
func TestMultistepRules(t *testing.T) {
	t.Parallel()
	text := "name = \"x\"\n[model]\npath = \"m\"\n[data]\ntrain = \"d\"\n[train]\nsteps = 1\n[multistep]\nenvironment = \"CartPole-v1\"\n[algorithm.ppo]\n"
	if r := read(t, text); !r.Problems.Empty() || r.Config.GetTrain().GetLearningRate() != 3e-4 || r.Config.GetMultistep().GetEnvironments() != 8 {
		t.Fatal(problems(r))
	}
	if r := read(t, text, "algorithm.ppo.minibatches=64"); !r.Problems.Empty() { // of chunks, not of samples
		t.Error(problems(r))
	}
	for set, want := range map[string]string{
		`reward={plugin="r.py:f"}`:                    "reward `[reward]` must be absent with `[multistep]`",
		`environment.kind="gymnasium"`:                "environment.kind `environment.kind` must be absent with `[multistep]`",
		`engine.kind="vllm"`:                          "engine.kind `engine.kind` must be \"transformers\" with `[multistep]`",
		`lora={rank=4}`:                               "lora `[lora]` must be absent with `[multistep]`",
		`train.ranks=2`:                               "train.ranks `train.ranks` must be 1 with `[multistep]`",
		`algorithm.ppo.kl_coefficient=0.1`:            "algorithm.ppo.kl_coefficient `algorithm.ppo.kl_coefficient` must be 0 with `[multistep]`",
		`algorithm.ppo.critic="network"`:              "algorithm.ppo.critic `algorithm.ppo.critic` must be \"head\" with `[multistep]`",
		`weights.verify="sampled"`:                    "weights.verify `weights.verify` must be \"full\" or \"none\" with `[multistep]`",
		`weights.update="rolling"`:                    "weights.update `weights.update` must be \"in_flight\" with `[multistep]`",
		`model.chat_template=true`:                    "model.chat_template `model.chat_template` must be false with `[multistep]`",
		`engine.workers=3`:                            "`multistep.environments` must be a multiple of `engine.workers`",
		`multistep.environment_workers=3`:             "`multistep.environments` must be a multiple of `multistep.environment_workers`",
		`multistep.environment_workers=1025`:          "multistep.environment_workers ",
		`multistep.environment_workers=-1`:            "multistep.environment_workers ",
		`multistep.chunk=0`:                           "multistep.chunk ",
		`multistep.reward_type="token_level"`:         "multistep.reward_type ",
		`multistep.logprob_type="episode_level"`:      "multistep.logprob_type ",
		`multistep.environments="many"`:               "multistep.environments ",
		`multistep={environment="x", bootstrap=true}`: "multistep.bootstrap ",
	} {
		found := read(t, text, set).Sorted()
		if len(found) != 1 || !strings.Contains(found[0].GetField()+" "+found[0].GetMessage(), want) || found[0].GetFix() == "" {
			t.Errorf("%s: got %v, want %q", set, found, want)
		}
	}
	for set, want := range map[string]string{
		`sampling.temperature=0.5`:                   "no tokens are sampled",
		`sampling.refill_rounds=2`:                   "no group is replaced",
		`engine.slots=4`:                             "`multistep.environments` are played at once",
		`environment.args={x=1}`:                     "the environment is `multistep.environment`",
		`environment.episode_timeout_seconds=9.0`:    "`environment.turn_timeout_seconds` and `multistep.max_steps` limit an episode",
		`data.prompt_field="question"`:               "the whole row goes to the environment",
		`algorithm.ppo.kl_in="loss"`:                 "no initial policy is loaded",
		`algorithm.ppo.importance_correction="none"`: "the ratio is that to the probability at the time of sampling",
		`algorithm.ppo.reduction="sequence"`:         "a minibatch has chunks of different episodes",
		`algorithm.ppo.mask_truncated=true`:          "a truncated episode ends with the value of its last observation",
		`algorithm.ppo.critic_learning_rate=1e-4`:    "the policy has the values",
		`train.gradient_checkpointing=true`:          "activations of a policy are always stored",
	} {
		key, _, _ := strings.Cut(set, "=")
		found := read(t, text, set).Sorted()
		wanted := "`" + key + "` has no effect with `[multistep]`: " + want
		if len(found) != 1 || found[0].GetMessage() != wanted || found[0].GetField() != key || found[0].GetFix() != "remove it" || found[0].GetFile() == "" {
			t.Errorf("%s: got %v, want %q", set, found, wanted)
		}
	}
	for _, one := range idleMultistep {
		for _, key := range one.keys {
			if keyAt(key) == nil {
				t.Errorf("there is no key %q", key)
			}
		}
	}
	for want, set := range map[string][]string{
		"": {`data.eval="e"`, "eval.every_steps=1", "eval.workers=1", "engine.workers=2", `gates.a={when="eval/return_low >= 3", action="stop"}`},
		"`eval.every_steps` needs `data.eval` with `[multistep]`":                    {"eval.every_steps=1"},
		"`[eval.suites.*]` must be absent with `[multistep]`":                        {`data.eval="e"`, "eval.every_steps=1", "eval.suites.a.samples=2"},
		"`eval.temperature` has no effect with `[multistep]`: evaluations take":      {`data.eval="e"`, "eval.every_steps=1", "eval.temperature=0.5"},
		"must be a multiple of `engine.workers`, without those of `eval.workers`":    {`data.eval="e"`, "eval.every_steps=1", "eval.workers=1", "engine.workers=4"},
		"reads `eval/reward`, but evaluations of this run measure returns":           {`data.eval="e"`, "eval.every_steps=1", `snapshot.best="eval/reward"`},
		"reads `eval/loss`, but evaluations of this run measure returns":             {`data.eval="e"`, "eval.every_steps=1", `gates.a={when="eval/loss < 3", action="stop"}`},
		"takes a snapshot after an evaluation, but with `eval.workers` the learner ": {`data.eval="e"`, "eval.every_steps=1", "eval.workers=1", "engine.workers=2", `snapshot.best="eval/return"`},
	} {
		found := read(t, text, set...).Sorted()
		if want == "" && len(found) == 0 {
			continue
		}
		if len(found) != 1 || want == "" || !strings.Contains(found[0].GetMessage(), want) || found[0].GetFix() == "" {
			t.Errorf("%s: got %v, want %q", set, found, want)
		}
	}
	if found := read(t, text, `multistep.reward_type="action_level"`, `multistep.logprob_type="chunk_level"`).Sorted(); len(found) != 1 || !strings.Contains(found[0].GetMessage(), "must not be \"chunk_level\" with `reward_type") || found[0].GetFix() == "" {
		t.Error(found)
	}
	sft := strings.Replace(text, "[algorithm.ppo]", "[algorithm.sft]", 1)
	if found := read(t, sft).Sorted(); len(found) == 0 || !strings.Contains(found[0].GetMessage(), "`[multistep]` needs `[algorithm.ppo]`") {
		t.Error(found)
	}
}
