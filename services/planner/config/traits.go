package config

import (
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/suite"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// traitRule is a rule between keys that depends on the traits of the algorithm. The contract has
// all other rules, in CEL.
type traitRule struct {
	id, message string
	keys        []string // keys that it reads; `algorithm.*` is the chosen algorithm's table
	broken      func(c *configv1.RunConfig, t *configv1.AlgorithmTraits) bool
}

var traitRules = append(multistepRules, []traitRule{
	{
		"run_config.sync_staleness", "`staleness.max_steps` must be 0 when `mode = \"sync\"` and samples come from the policy",
		[]string{"mode", "staleness.max_steps"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return c.GetMode() == "sync" && c.GetStaleness().GetMaxSteps() > 0 && !algorithm.FromData(c)
		},
	},
	{
		"run_config.reward", "`[algorithm.*]` needs a `[reward]` table",
		[]string{"reward", "environment.kind"},
		func(c *configv1.RunConfig, t *configv1.AlgorithmTraits) bool {
			return t.GetNeedsReward() && !algorithm.Rewarded(c) && !algorithm.External(c)
		},
	},
	{
		"run_config.external_reward", "`[reward]` must be absent when `environment.kind = \"external\"`: the agent returns the rewards",
		[]string{"reward", "environment.kind"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return algorithm.External(c) && c.GetReward() != nil
		},
	},
	{
		"run_config.external_eval", "`eval.every_steps` must be 0 when `environment.kind = \"external\"`: no agent answers held-out rows",
		[]string{"eval.every_steps", "environment.kind"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return algorithm.External(c) && c.GetEval().GetEverySteps() > 0
		},
	},
	{
		"run_config.external_rows", "`environment.kind = \"external\"` needs an algorithm that samples; `[algorithm.*]` trains on rows",
		[]string{"environment.kind"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return algorithm.External(c) && algorithm.FromData(c)
		},
	},
	{
		"run_config.external_teacher", "`[algorithm.distillation.endpoint]` must be absent when `environment.kind = \"external\"`: no worker asks the endpoint",
		[]string{"algorithm.distillation.endpoint", "environment.kind"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return algorithm.External(c) && c.GetAlgorithm().GetDistillation().GetEndpoint() != nil
		},
	},
	{
		"run_config.external_deterministic", "`deterministic` must be false when `environment.kind = \"external\"`: an agent may send other requests the next time",
		[]string{"deterministic", "environment.kind"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return algorithm.External(c) && c.GetDeterministic()
		},
	},
	{
		"run_config.external_smaller", "`limits.min_group_size` must be 0 when `environment.kind = \"external\"`: a session that fails dissolves its group",
		[]string{"limits.min_group_size", "environment.kind"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return algorithm.External(c) && c.GetLimits().GetMinGroupSize() > 0
		},
	},
	{
		"run_config.environment_reward", "`[reward]` must be absent for this `environment.kind`: the environment scores its episodes",
		[]string{"reward", "environment.kind"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return algorithm.EnvironmentRewards(c) && c.GetMultistep() == nil && c.GetReward() != nil
		},
	},
	{
		"run_config.environment_rows", "this `environment.kind` needs an algorithm that samples; `[algorithm.*]` trains on rows",
		[]string{"environment.kind"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return algorithm.Turns(c) && algorithm.FromData(c)
		},
	},
	{
		"run_config.environment_teacher", "`[algorithm.distillation.endpoint]` must be absent for this `environment.kind`: the endpoint scores single turns",
		[]string{"algorithm.distillation.endpoint", "environment.kind"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return algorithm.Turns(c) && c.GetAlgorithm().GetDistillation().GetEndpoint() != nil
		},
	},
	{
		"run_config.credit", "`environment.credit` must be \"episode\" for `[algorithm.*]`: its tokens have no rewards of their own",
		[]string{"environment.credit"},
		func(c *configv1.RunConfig, t *configv1.AlgorithmTraits) bool {
			credit := c.GetEnvironment().GetCredit()
			return credit != "" && credit != "episode" && !t.GetTokenRewards()
		},
	},
	{
		"run_config.min_group_size", "`limits.min_group_size` must not exceed `sampling.group_size`",
		[]string{"limits.min_group_size", "sampling.group_size"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return c.GetLimits().GetMinGroupSize() > c.GetSampling().GetGroupSize()
		},
	},
	{
		"run_config.min_group_compared", "`limits.min_group_size` must not be 1 for `[algorithm.*]`: the samples of a group are compared",
		[]string{"limits.min_group_size", "algorithm.*.group_baseline"},
		func(c *configv1.RunConfig, t *configv1.AlgorithmTraits) bool {
			baseline, ok := algorithm.Setting(c, "group_baseline")
			return c.GetLimits().GetMinGroupSize() == 1 && (t.GetComparesGroup() || ok && baseline.Bool())
		},
	},
	{
		"run_config.group_size", "`sampling.group_size` must be at least 2 for `[algorithm.*]`: the samples of a group are compared",
		[]string{"sampling.group_size", "algorithm.*.group_baseline"},
		func(c *configv1.RunConfig, t *configv1.AlgorithmTraits) bool {
			baseline, ok := algorithm.Setting(c, "group_baseline")
			return c.GetSampling().GetGroupSize() < 2 && (t.GetComparesGroup() || ok && baseline.Bool())
		},
	},
	{
		"run_config.single", "`sampling.group_size` must be 1 for `[algorithm.*]`: each row is trained on as it is",
		[]string{"sampling.group_size"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return c.GetSampling().GetGroupSize() != 1 && algorithm.FromData(c)
		},
	},
	{
		"run_config.temperature", "`sampling.temperature` must be above 0 for `[algorithm.*]`: the samples of a group would all be the same",
		[]string{"sampling.temperature"},
		func(c *configv1.RunConfig, t *configv1.AlgorithmTraits) bool {
			return c.GetSampling().GetTemperature() <= 0 && t.GetComparesGroup()
		},
	},
	{
		"run_config.deliver", "`train.deliver_every_steps` must be 1 for `[algorithm.*]`: samples come from the policy",
		[]string{"train.deliver_every_steps"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return c.GetTrain().GetDeliverEverySteps() != 1 && !algorithm.FromData(c)
		},
	},
	{
		"run_config.minibatches", "`algorithm.*.minibatches` must not exceed the samples of a step, `train.groups_per_step` times `sampling.group_size`",
		[]string{"algorithm.*.minibatches", "train.groups_per_step", "sampling.group_size"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			minibatches, ok := algorithm.Setting(c, "minibatches")
			return ok && c.GetMultistep() == nil && minibatches.Uint() > uint64(c.GetTrain().GetGroupsPerStep())*uint64(c.GetSampling().GetGroupSize())
		},
	},
	{
		"run_config.eval_data", "`eval.every_steps` needs `data.eval` or a suite, and a `[reward]` table where the algorithm samples",
		[]string{"eval.every_steps", "data.eval", "reward", "environment.kind"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			rows := c.GetData().GetEval() != "" || len(suite.InRun(c)) > 0
			return c.GetEval().GetEverySteps() > 0 && c.GetMultistep() == nil && !algorithm.External(c) && (!rows || !algorithm.Rewarded(c) && !algorithm.FromData(c))
		},
	},
	{
		"run_config.eval_workers", "`eval.workers` must be less than `engine.workers`: the other workers sample for training",
		[]string{"eval.workers", "engine.workers"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			n := c.GetEval().GetWorkers()
			return n > 0 && n >= max(1, c.GetEngine().GetWorkers())
		},
	},
	{
		"run_config.eval_workers_idle", "`eval.workers` needs evaluations that sample completions: `eval.every_steps` and a `[reward]` table",
		[]string{"eval.workers", "eval.every_steps", "reward"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return c.GetEval().GetWorkers() > 0 && (c.GetEval().GetEverySteps() == 0 || algorithm.TeachesHeldOut(c))
		},
	},
	{
		"run_config.reward_model_eval", "`[reward]` must be absent for evaluations of `[algorithm.*]`: the model generates no text",
		[]string{"eval.every_steps", "reward"},
		func(c *configv1.RunConfig, t *configv1.AlgorithmTraits) bool {
			return c.GetEval().GetEverySteps() > 0 && c.GetReward() != nil && t.GetScores()
		},
	},
	{
		"run_config.context", "`sampling.max_tokens` must be below `engine.max_model_len`",
		[]string{"sampling.max_tokens", "engine.max_model_len", "eval.every_steps", "reward"},
		func(c *configv1.RunConfig, _ *configv1.AlgorithmTraits) bool {
			return c.GetSampling().GetMaxTokens() >= c.GetEngine().GetMaxModelLen() && algorithm.Samples(c)
		},
	},
}...)

// traits checks the rules that depend on the algorithm.
func (r *checker) traits() {
	if algorithm.Name(r.Config) == "" {
		return
	}
	traits := algorithm.Traits(r.Config)
	for _, rule := range traitRules {
		if rule.broken(r.Config, traits) {
			r.crossField(rule.id, rule.message, "", rule.keys)
		}
	}
}
