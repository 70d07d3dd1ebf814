package config

import (
	"fmt"

	"github.com/rollout-rl/rollout/libs/algorithm"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// multistepRules are the rules of runs whose policy acts for many steps: no tokens are sampled, and
// the environment rewards every step.
var multistepRules = []traitRule{
	whereMultistep(
		"run_config.multistep_algorithm", "`[multistep]` needs `[algorithm.ppo]`, which estimates advantages of steps",
		[]string{"multistep"},
		func(c *configv1.RunConfig) bool { return algorithm.Name(c) != "ppo" },
	),
	whereMultistep(
		"run_config.multistep_reward", "`[reward]` must be absent with `[multistep]`: the environment rewards every step",
		[]string{"reward", "multistep"},
		func(c *configv1.RunConfig) bool { return c.GetReward() != nil },
	),
	whereMultistep(
		"run_config.multistep_kind", "`environment.kind` must be absent with `[multistep]`: the environment is `multistep.environment`",
		[]string{"environment.kind", "multistep"},
		func(c *configv1.RunConfig) bool { return c.GetEnvironment().GetKind() != "single_turn" },
	),
	whereMultistep(
		"run_config.multistep_engine", "`engine.kind` must be \"transformers\" with `[multistep]`: other engines decode tokens only",
		[]string{"engine.kind", "multistep"},
		func(c *configv1.RunConfig) bool { return c.GetEngine().GetKind() != "transformers" },
	),
	whereMultistep(
		"run_config.multistep_lora", "`[lora]` must be absent with `[multistep]`: all weights of the policy are trained",
		[]string{"lora", "multistep"},
		func(c *configv1.RunConfig) bool { return c.GetLora() != nil },
	),
	whereMultistep(
		"run_config.multistep_ranks", "`train.ranks` must be 1 with `[multistep]`",
		[]string{"train.ranks", "multistep"},
		func(c *configv1.RunConfig) bool { return c.GetTrain().GetRanks() > 1 },
	),
	whereMultistep(
		"run_config.multistep_eval", "`eval.every_steps` needs `data.eval` with `[multistep]`: each of its rows is an episode",
		[]string{"eval.every_steps", "data.eval"},
		func(c *configv1.RunConfig) bool {
			return c.GetEval().GetEverySteps() > 0 && c.GetData().GetEval() == ""
		},
	),
	whereMultistep(
		"run_config.multistep_suites", "`[eval.suites.*]` must be absent with `[multistep]`: evaluations play the episodes of `data.eval`",
		[]string{"eval.suites", "multistep"},
		func(c *configv1.RunConfig) bool { return len(c.GetEval().GetSuites()) > 0 },
	),
	whereMultistep(
		"run_config.multistep_kl", "`algorithm.ppo.kl_coefficient` must be 0 with `[multistep]`: no initial policy is loaded",
		[]string{"algorithm.ppo.kl_coefficient", "multistep"},
		func(c *configv1.RunConfig) bool {
			return c.GetAlgorithm().GetPpo().GetLoss().GetKlCoefficient() > 0
		},
	),
	whereMultistep(
		"run_config.multistep_critic", "`algorithm.ppo.critic` must be \"head\" with `[multistep]`: the policy has the values",
		[]string{"algorithm.ppo.critic", "multistep"},
		func(c *configv1.RunConfig) bool { return c.GetAlgorithm().GetPpo().GetCritic() == "network" },
	),
	whereMultistep(
		"run_config.multistep_verify", "`weights.verify` must be \"full\" or \"none\" with `[multistep]`",
		[]string{"weights.verify", "multistep"},
		func(c *configv1.RunConfig) bool { return c.GetWeights().GetVerify() == "sampled" },
	),
	whereMultistep(
		"run_config.multistep_update", "`weights.update` must be \"in_flight\" with `[multistep]`: episodes continue with new weights",
		[]string{"weights.update", "multistep"},
		func(c *configv1.RunConfig) bool { return c.GetWeights().GetUpdate() != "in_flight" },
	),
	whereMultistep(
		"run_config.multistep_chat", "`model.chat_template` must be false with `[multistep]`: the policy reads observations",
		[]string{"model.chat_template", "multistep"},
		func(c *configv1.RunConfig) bool { return c.GetModel().GetChatTemplate() },
	),
	whereMultistep(
		"run_config.multistep_logprob_type", "`multistep.logprob_type` must not be \"chunk_level\" with `reward_type = \"action_level\"`: each action has its own advantage",
		[]string{"multistep.logprob_type", "multistep.reward_type"},
		func(c *configv1.RunConfig) bool {
			return c.GetMultistep().GetLogprobType() == "chunk_level" && c.GetMultistep().GetRewardType() == "action_level"
		},
	),
	whereMultistep(
		"run_config.multistep_environments", "`multistep.environments` must be a multiple of `engine.workers`, without those of `eval.workers`",
		[]string{"multistep.environments", "engine.workers", "eval.workers"},
		func(c *configv1.RunConfig) bool {
			workers, reserved := max(1, c.GetEngine().GetWorkers()), c.GetEval().GetWorkers()
			return reserved < workers && c.GetMultistep().GetEnvironments()%(workers-reserved) != 0
		},
	),
	whereMultistep(
		"run_config.multistep_environment_workers", "`multistep.environments` must be a multiple of `multistep.environment_workers`",
		[]string{"multistep.environments", "multistep.environment_workers"},
		func(c *configv1.RunConfig) bool {
			return c.GetMultistep().GetEnvironments()%max(1, c.GetMultistep().GetEnvironmentWorkers()) != 0
		},
	),
}

// whereMultistep is a rule of runs with `[multistep]`.
func whereMultistep(id, message string, keys []string, broken func(c *configv1.RunConfig) bool) traitRule {
	return traitRule{id, message, keys, func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
		return c.GetMultistep() != nil && broken(c)
	}}
}

// idleMultistep has keys without an effect in runs with `[multistep]`.
var idleMultistep = []struct {
	why  string
	keys []string
}{
	{"no tokens are sampled", []string{
		"sampling.max_tokens", "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p", "sampling.stop",
		"engine.max_model_len", "model.chat_family", "environment.max_turns", "environment.max_episode_tokens",
		"algorithm.ppo.overlong_share", "algorithm.ppo.overlong_penalty",
	}},
	{"evaluations take the most likely actions", []string{"eval.temperature"}},
	{"no group is replaced", []string{"sampling.refill_rounds", "sampling.refill_shortfall"}},
	{"`multistep.environments` are played at once", []string{"engine.slots", "environment.concurrency"}},
	{"the environment is `multistep.environment`", []string{
		"environment.args", "environment.python", "environment.max_child_sessions", "environment.credit",
	}},
	{"`environment.turn_timeout_seconds` and `multistep.max_steps` limit an episode", []string{
		"environment.tool_timeout_seconds", "environment.episode_timeout_seconds", "environment.group_timeout_seconds",
	}},
	{"the whole row goes to the environment", []string{"data.prompt_field", "data.answer_field"}},
	{"no initial policy is loaded", []string{
		"algorithm.ppo.kl_estimator", "algorithm.ppo.kl_in", "algorithm.ppo.kl_target", "algorithm.ppo.kl_horizon", "health.kl_reference",
	}},
	{"the ratio is that to the probability at the time of sampling", []string{
		"algorithm.ppo.old_policy", "algorithm.ppo.importance_correction", "algorithm.ppo.importance_level",
		"algorithm.ppo.importance_cap", "algorithm.ppo.importance_floor",
		"algorithm.ppo.importance_sample_mask", "algorithm.ppo.importance_sample_cap", "algorithm.ppo.importance_sample_floor",
	}},
	{"a minibatch has chunks of different episodes", []string{"algorithm.ppo.reduction"}},
	{"a truncated episode ends with the value of its last observation", []string{"algorithm.ppo.mask_truncated"}},
	{"the policy has the values", []string{"algorithm.ppo.critic_learning_rate"}},
	{"activations of a policy are always stored", []string{"train.gradient_checkpointing"}},
}

// idleMultistep reports keys that the text sets and that have no effect with `[multistep]`, and
// returns them.
func (r *checker) idleMultistep() map[string]bool {
	reported := map[string]bool{}
	if r.Config.GetMultistep() == nil {
		return reported
	}
	for _, one := range idleMultistep {
		for _, key := range one.keys {
			if r.Wrote(key) && r.Readable(key) {
				reported[key] = true
				r.Problems.At(r.Place(key), problem.Conflict, key, fmt.Sprintf("`%s` has no effect with `[multistep]`: %s", key, one.why), "remove it")
			}
		}
	}
	return reported
}
