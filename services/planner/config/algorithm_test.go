package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/algorithm"
)

// as is the good configuration with another algorithm.
func as(name string) string {
	text := strings.Replace(good, "[algorithm.grpo]", "[algorithm."+name+"]", 1)
	if name == "distillation" {
		text = strings.Replace(text, "[algorithm.distillation]", "[algorithm.distillation]\nteacher = \"teacher\"", 1)
	}
	switch name {
	case "sft", "reward_model", "dpo", "ipo", "kto":
		text = strings.Replace(text, "group_size = 8", "", 1)
	}
	return text
}

func TestEveryAlgorithmIsValidWithItsDefaults(t *testing.T) {
	t.Parallel()
	for _, table := range oneofTables("algorithm") {
		name := strings.TrimSuffix(strings.TrimPrefix(table, "[algorithm."), "]")
		r := read(t, as(name))
		if !r.Problems.Empty() || algorithm.Name(r.Config) != name {
			t.Errorf("%s: %s%v", name, problems(r), r.Config.GetAlgorithm())
		}
	}
}

// TestDistillationNeedsNoReward: the loss comes from the teacher.
func TestDistillationNeedsNoReward(t *testing.T) {
	t.Parallel()
	r := read(t, strings.Replace(as("distillation"), "[reward]\nplugin = \"reward.py:exact\"\n", "", 1))
	if !r.Problems.Empty() || r.Config.GetReward() != nil {
		t.Errorf("%s%v", problems(r), r.Config.GetReward())
	}
}

// TestAlgorithmsRefuseBadInput lists the problems of bad settings of algorithms: reason, place,
// text, and fix.
func TestAlgorithmsRefuseBadInput(t *testing.T) {
	t.Parallel()
	const reward = "[reward]\nplugin = \"reward.py:exact\"\n"
	for _, c := range []struct {
		name, algorithm, without string
		set                      []string
		want                     string
	}{
		{"no reward", "ppo", reward, nil,
			"CONFLICT algorithm.ppo: `[algorithm.ppo]` needs a `[reward]` table: add [reward] with `plugin = \"reward.py:function\"`"},
		{"group of one sample", "dapo", "group_size = 8", nil,
			"CONFLICT algorithm.dapo: `sampling.group_size` must be at least 2 for `[algorithm.dapo]`: the samples of a group are compared: write `group_size = 8` in [sampling]"},
		{"group baseline with one sample", "reinforce_pp", "group_size = 8", []string{"algorithm.reinforce_pp.group_baseline=true"},
			"CONFLICT algorithm.reinforce_pp: `sampling.group_size` must be at least 2 for `[algorithm.reinforce_pp]`: the samples of a group are compared: write `group_size = 8` in [sampling]"},
		{"pairs from a group of one sample", "online_dpo", "group_size = 8", nil,
			"CONFLICT algorithm.online_dpo: `sampling.group_size` must be at least 2 for `[algorithm.online_dpo]`: the samples of a group are compared: write `group_size = 8` in [sampling]"},
		{"online DPO without a reward", "online_dpo", reward, nil,
			"CONFLICT algorithm.online_dpo: `[algorithm.online_dpo]` needs a `[reward]` table: add [reward] with `plugin = \"reward.py:function\"`"},
		{"DPO with groups", "dpo", "", []string{"sampling.group_size=4"},
			"CONFLICT sampling.group_size: `sampling.group_size` must be 1 for `[algorithm.dpo]`: each row is trained on as it is: remove `group_size` from [sampling]"},
		{"groups at temperature 0", "gspo", "", []string{"sampling.temperature=0"},
			"CONFLICT sampling.temperature: `sampling.temperature` must be above 0 for `[algorithm.gspo]`: the samples of a group would all be the same: remove `temperature` from [sampling]: 1.0 is the default"},
		{"staleness in sync mode", "rloo", "", []string{"staleness.max_steps=2"},
			"CONFLICT staleness.max_steps: `staleness.max_steps` must be 0 when `mode = \"sync\"` and samples come from the policy: remove `staleness.max_steps`, or write `mode = \"async\"`"},
		{"weights delivered every fourth step", "distillation", "", []string{"train.deliver_every_steps=4"},
			"CONFLICT train.deliver_every_steps: `train.deliver_every_steps` must be 1 for `[algorithm.distillation]`: samples come from the policy: remove `deliver_every_steps`: 1 is the default"},
		{"average with adapters", "grpo", "", []string{"lora.rank=8", "train.ema_decay=0.99"},
			"CONFLICT train.ema_decay: `train.ema_decay` and `[lora]` exclude each other: adapters have no average: remove `ema_decay` from [train], or the table [lora]"},
		{"average with decay 1", "grpo", "", []string{"train.ema_decay=1"},
			"OUT_OF_RANGE train.ema_decay: `train.ema_decay` must be at least 0 and below 1, got 1: write a number at least 0 and below 1; the default is 0.0"},
		{"max_tokens as large as the context", "grpo", "", []string{"sampling.max_tokens=2048"},
			"CONFLICT sampling.max_tokens: `sampling.max_tokens` must be below `engine.max_model_len`: lower `max_tokens` in [sampling], or raise `max_model_len` in [engine]"},
		{"max_tokens without sampling", "sft", "", []string{"sampling.max_tokens=2048"}, ""},
		{"max_tokens with sampled evaluations", "sft", "", []string{"sampling.max_tokens=2048", "data.eval=eval.jsonl", "eval.every_steps=1"},
			"CONFLICT sampling.max_tokens: `sampling.max_tokens` must be below `engine.max_model_len`: lower `max_tokens` in [sampling], or raise `max_model_len` in [engine]"},
		{"max_tokens with evaluations of the loss", "sft", reward, []string{"sampling.max_tokens=2048", "data.eval=eval.jsonl", "eval.every_steps=1"}, ""},
		{"reward model with a reward", "reward_model", "", []string{"data.eval=eval.jsonl", "eval.every_steps=1"},
			"CONFLICT reward: `[reward]` must be absent for evaluations of `[algorithm.reward_model]`: the model generates no text: remove the table [reward]: evaluations then report `rewards/accuracy` on the held-out pairs"},
		{"reward model with held-out pairs", "reward_model", reward, []string{"data.eval=eval.jsonl", "eval.every_steps=1"}, ""},
		{"more minibatches than samples", "gspo", "", []string{"algorithm.gspo.minibatches=17", "train.groups_per_step=2"},
			"CONFLICT algorithm.gspo.minibatches: `algorithm.gspo.minibatches` must not exceed the samples of a step, `train.groups_per_step` times `sampling.group_size`: lower `minibatches`, or raise `groups_per_step` in [train]"},
		{"k1 in the loss", "grpo", "", []string{"algorithm.grpo.kl_coefficient=0.1", "algorithm.grpo.kl_estimator=k1"},
			"CONFLICT algorithm.grpo.kl_estimator: `algorithm.grpo.kl_estimator` must not be \"k1\" with `kl_in = \"loss\"`: the gradient of k1 has mean 0 there: write `kl_estimator = \"k3\"`, or `kl_in = \"reward\"`"},
		{"KL target without a coefficient", "ppo", "", []string{"algorithm.ppo.kl_coefficient=0", "algorithm.ppo.kl_target=0.1"},
			"CONFLICT algorithm.ppo.kl_target: `algorithm.ppo.kl_target` needs `algorithm.ppo.kl_coefficient` above 0, which it adapts: remove `kl_target`, or write `kl_coefficient = 0.05`"},
		{"dual clip below 1", "ppo", "", []string{"algorithm.ppo.dual_clip=0.9"},
			"CONFLICT algorithm.ppo.dual_clip: `algorithm.ppo.dual_clip` must be above 1, or 0 for no bound: write `dual_clip = 3.0`, or remove it"},
		{"warm-up of a head", "ppo", "", []string{"algorithm.ppo.critic_warmup_steps=3"},
			"CONFLICT algorithm.ppo.critic_warmup_steps: `algorithm.ppo.critic_warmup_steps` needs `critic = \"network\"`: a head has the optimizer of the policy: write `critic = \"network\"`, or remove `critic_warmup_steps`"},
		{"warm-up of the critic in every step", "ppo", "", []string{"algorithm.ppo.critic=network", "algorithm.ppo.critic_warmup_steps=9", "train.steps=9"},
			"CONFLICT algorithm.ppo.critic_warmup_steps: `algorithm.ppo.critic_warmup_steps` must be below `train.steps`: the policy would never be trained: lower `critic_warmup_steps` or raise `steps`"},
		{"dual clip with CISPO", "cispo", "", []string{"algorithm.cispo.dual_clip=3"},
			"CONFLICT algorithm.cispo.dual_clip: `algorithm.cispo.dual_clip` must be 0: CISPO clips weights of gradients, not losses: remove `dual_clip`"},
		{"default of the algorithm in the fix", "dapo", "", []string{"algorithm.dapo.clip_high=-1"},
			"OUT_OF_RANGE algorithm.dapo.clip_high: `algorithm.dapo.clip_high` must be between 0 and 100, got -1: write a number between 0 and 100; the default is 0.28"},
		{"importance floor above the cap", "grpo", "", []string{"mode=async", "algorithm.grpo.importance_correction=mask", "algorithm.grpo.importance_cap=0.3"},
			"CONFLICT algorithm.grpo.importance_cap: `algorithm.grpo.importance_floor` must not exceed `algorithm.grpo.importance_cap`: every token would be masked: lower `importance_floor` or raise `importance_cap`"},
		{"sample floor above the cap", "grpo", "", []string{"mode=async", "algorithm.grpo.importance_sample_mask=geometric", "algorithm.grpo.importance_sample_cap=0.9", "algorithm.grpo.importance_sample_floor=0.99"},
			"CONFLICT algorithm.grpo.importance_sample_floor: `algorithm.grpo.importance_sample_floor` must not exceed `algorithm.grpo.importance_sample_cap`: every sample would be masked: lower `importance_sample_floor` or raise `importance_sample_cap`"},
		{"an unknown sample mask", "rloo", "", []string{"mode=async", "algorithm.rloo.importance_sample_mask=token"},
			"BAD_VALUE algorithm.rloo.importance_sample_mask: `algorithm.rloo.importance_sample_mask` must be \"none\", \"sequence\" or \"geometric\", got \"token\": write \"none\", \"sequence\" or \"geometric\""},
		{"sample cap without a sample mask", "dapo", "", []string{"mode=async", "algorithm.dapo.importance_sample_cap=3"},
			"CONFLICT algorithm.dapo.importance_sample_cap: `algorithm.dapo.importance_sample_cap` has no effect where `algorithm.dapo.importance_sample_mask` is none: no sample is left out: remove it, or change `algorithm.dapo.importance_sample_mask`"},
		{"importance cap with CISPO", "cispo", "", []string{"mode=async", "algorithm.cispo.importance_cap=3"},
			"CONFLICT algorithm.cispo.importance_cap: `algorithm.cispo.importance_cap` has no effect where `algorithm.cispo.old_policy` is engine: the ratio itself is that to the policy that sampled: remove it, or change `algorithm.cispo.old_policy`"},
		{"sample mask in deterministic mode", "grpo", "", []string{"algorithm.grpo.importance_sample_mask=sequence"},
			"CONFLICT algorithm.grpo.importance_sample_mask: `algorithm.grpo.importance_sample_mask` has no effect where `deterministic` is true: the engine computes the same probabilities as the learner: remove it, or change `deterministic`"},
		{"both KTO weights 0", "kto", "", []string{"algorithm.kto.desirable_weight=0", "algorithm.kto.undesirable_weight=0"},
			"CONFLICT algorithm.kto.desirable_weight: `algorithm.kto.desirable_weight` and `algorithm.kto.undesirable_weight` must not both be 0: remove one of them: 1.0 is the default"},
		{"no teacher", "distillation", "teacher = \"teacher\"\n", nil,
			"CONFLICT algorithm.distillation: `[algorithm.distillation]` takes exactly one of `teacher` and `[algorithm.distillation.endpoint]`: " +
				"write `teacher = \"models/teacher\"`, or a table [algorithm.distillation.endpoint] with `base_url` and `model`"},
		{"top-k of an endpoint", "distillation", "teacher = \"teacher\"\n", []string{"algorithm.distillation.endpoint.base_url=http://127.0.0.1:8000/v1", "algorithm.distillation.endpoint.model=teacher", "algorithm.distillation.teacher_top_k=8"},
			"CONFLICT algorithm.distillation.teacher_top_k: `algorithm.distillation.teacher_top_k` needs `teacher`: an endpoint reports logprobs of sampled tokens only: " +
				"write `teacher = \"models/teacher\"` instead of the table [algorithm.distillation.endpoint], or remove `teacher_top_k`"},
		{"an importance cap with top-k", "distillation", "", []string{"deterministic=false", "algorithm.distillation.teacher_top_k=8", "algorithm.distillation.importance_cap=3"},
			"CONFLICT algorithm.distillation.importance_cap: `algorithm.distillation.importance_cap` has no effect where `algorithm.distillation.teacher_top_k` is 8: " +
				"the divergence of the teacher's tokens has no importance weight: remove it, or change `algorithm.distillation.teacher_top_k`"},
		{"too many tokens of the teacher", "distillation", "", []string{"algorithm.distillation.teacher_top_k=2000"},
			"OUT_OF_RANGE algorithm.distillation.teacher_top_k: `algorithm.distillation.teacher_top_k` must be between 0 and 1024, got 2000: write a number between 0 and 1024; the default is 0"},
		{"too much label smoothing", "dpo", "", []string{"algorithm.dpo.label_smoothing=0.5"},
			"OUT_OF_RANGE algorithm.dpo.label_smoothing: `algorithm.dpo.label_smoothing` must be at least 0 and below 0.5, got 0.5: write a number at least 0 and below 0.5; the default is 0.0"},
		{"beta 0", "ipo", "", []string{"algorithm.ipo.beta=0"},
			"OUT_OF_RANGE algorithm.ipo.beta: `algorithm.ipo.beta` must be above 0 and at most 100, got 0: write a number above 0 and at most 100; the default is 0.1"},
		{"an unknown reduction", "cispo", "", []string{"algorithm.cispo.reduction=sample"},
			"BAD_VALUE algorithm.cispo.reduction: `algorithm.cispo.reduction` must be \"token\", \"sequence\" or \"constant\", got \"sample\": write \"token\", \"sequence\" or \"constant\""},
		{"zero epochs", "ppo", "", []string{"algorithm.ppo.epochs=0"},
			"OUT_OF_RANGE algorithm.ppo.epochs: `algorithm.ppo.epochs` must be between 1 and 100, got 0: write a number between 1 and 100; the default is 4"},
		{"name of another trainer", "ppo", "", []string{"algorithm.ppo.lam=0.9"},
			"UNKNOWN_KEY algorithm.ppo.lam: unknown key `lam` in [algorithm.ppo]: write `gae_lambda = 0.9`"},
		{"algorithm as a top-level table", "dpo", "", []string{"dpo.beta=0.2"}, "UNKNOWN_KEY dpo: unknown table [dpo]: write [algorithm.dpo]"},
		{"a misspelled algorithm", "dppo", "", nil, "UNKNOWN_KEY algorithm.dppo: unknown algorithm `dppo`: did you mean [algorithm.ppo]?"},
		{"two algorithms", "dpo", "", []string{"algorithm.ipo.beta=0.1"},
			"CONFLICT algorithm.ipo: a run has one algorithm, and [algorithm.ipo] conflicts with [algorithm.dpo] on line 15: remove one of the two tables"},
	} {
		text := as(c.algorithm)
		if c.without != "" {
			text = strings.Replace(text, c.without, "", 1)
		}
		var got []string
		for _, p := range read(t, text, c.set...).Sorted() {
			got = append(got, fmt.Sprintf("%s %s: %s: %s", p.GetReason(), p.GetField(), p.GetMessage(), p.GetFix()))
		}
		if strings.Join(got, "\n") != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, strings.Join(got, "\n     "), c.want)
		}
	}
}
