package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/nearest"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/reward"
	"github.com/rollout-rl/rollout/libs/suite"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// suites reports suites that can't be evaluated.
func (r *checker) suites() {
	for _, name := range suite.Names(r.Config) {
		s, table := r.Config.GetEval().GetSuites()[name], "eval.suites."+name
		field := func(key string) string { return table + "." + key }
		if r.unread(table) || !r.Readable(field("kind")) {
			continue
		}
		missing := func(key, message, fix string) {
			r.Problems.At(r.Place(field(key)), problem.MissingKey, field(key), fmt.Sprintf("[%s] %s", table, message), fix)
		}
		conflict := func(key, message, fix string) {
			r.Problems.At(r.Place(field(key)), problem.Conflict, field(key), fmt.Sprintf("`%s` %s", field(key), message), fix)
		}
		if suite.OfLibrary(s) {
			r.suiteOfLibrary(name, s, missing, conflict)
			continue
		}
		for _, key := range []string{"tasks", "args", "num_fewshot", "python"} {
			if r.Wrote(field(key)) {
				conflict(key, "has no effect without a library", "write `kind = \"inspect_ai\"` or `kind = \"lm_eval\"`, or remove it")
			}
		}
		metrics, err := suite.ParseAll(suite.MetricsOf(s), int(max(1, s.GetSamples())), s.Baseline != nil)
		var wrong *suite.Error
		if errors.As(err, &wrong) && r.Readable(field("metrics")) && r.Readable(field("samples")) && r.Readable(field("baseline")) {
			r.Problems.At(r.Place(field("metrics")), problem.BadValue, field("metrics"), fmt.Sprintf("`%s`: %s", field("metrics"), wrong.Message), wrong.Fix)
		}
		one := suite.Config(r.Config, name)
		if one.GetData().GetEval() == "" && r.Readable(field("data")) && !r.Wrote("data.eval") {
			missing("data", "has no rows", "write `data = \"heldout.jsonl\"`")
		}
		if planformat.IsPlugin(s.GetData()) && r.Readable(field("data")) {
			conflict("data", "is a data source, whose rows a suite can't read", "write the rows to a JSON Lines file and name that")
		}
		if !algorithm.Rewarded(one) && r.Readable(field("reward")) && r.Readable("reward") && r.Readable(field("environment")) {
			missing("reward", "has nothing that scores its samples", "write `reward = { plugin = \"reward.py:function\" }`, or a table [reward]")
		}
		if s.Reward != nil && algorithm.EnvironmentRewards(one) {
			conflict("reward", "has no effect: the environment scores its episodes", "remove it")
		}
		if r.inRun(name) {
			r.suiteOfRun(s, one, conflict)
		}
		if s.GetSamples() > 1 && s.Temperature != nil && s.GetTemperature() == 0 && r.Readable(field("samples")) && r.Readable(field("temperature")) {
			conflict("temperature", "is 0, which gives equal samples of a row", "write `temperature = 1.0`, or `samples = 1`")
		}
		if s.Baseline != nil && err == nil && !slices.ContainsFunc(metrics, func(m suite.Metric) bool { return m.Kind == suite.WinRate }) {
			conflict("baseline", "has no effect without the metric `win_rate`", "write `metrics = [\"win_rate\"]`, or remove it")
		}
	}
}

// suiteOfLibrary reports what does not fit a suite whose tasks are those of a library.
func (r *checker) suiteOfLibrary(name string, s *configv1.EvalSuiteConfig, missing, conflict func(key, message, fix string)) {
	field := func(key string) string { return "eval.suites." + name + "." + key }
	kind := s.GetKind()
	if len(s.GetTasks()) == 0 && r.Readable(field("tasks")) {
		fix := "write `tasks = [\"sums.py@sums\"]`"
		if kind == suite.LMEval {
			fix = "write `tasks = [\"sums.yaml\"]`"
		}
		missing("tasks", "has no tasks", fix)
	}
	for _, key := range []string{"data", "metrics", "pass_score", "cluster", "baseline", "reward", "environment"} {
		if r.Wrote(field(key)) {
			conflict(key, fmt.Sprintf("has no effect: the tasks of %s have their own data and metrics", kind), "remove it")
		}
	}
	switch {
	case kind == suite.InspectAI && s.NumFewshot != nil:
		conflict("num_fewshot", "is for `kind = \"lm_eval\"`", "remove it, or give the task an argument in `args`")
	case kind == suite.LMEval && s.Args != nil:
		conflict("args", "is for `kind = \"inspect_ai\"`: tasks of lm_eval take no arguments", "remove it")
	}
	if kind == suite.LMEval && s.GetSamples() > 1 {
		conflict("samples", "must be 1: lm_eval samples each question once", "remove it, or write `repeats` into the task")
	}
	if r.inRun(name) {
		conflict("kind", "is for `rollout eval` only", "move the suite to another file, for `rollout eval --suite FILE`")
	}
}

// inRun reports whether the evaluations of the run evaluate a suite.
func (r *checker) inRun(name string) bool {
	return r.Readable("eval.every_steps") && slices.Contains(suite.InRun(r.Config), name)
}

// suiteOfRun reports what only `rollout eval` does with a suite. one is the configuration of the
// suite.
func (r *checker) suiteOfRun(s *configv1.EvalSuiteConfig, one *configv1.RunConfig, conflict func(key, message, fix string)) {
	const apart = "move the suite to another file, for `rollout eval --suite FILE`"
	if s.Environment != nil {
		conflict("environment", "is for `rollout eval` only: evaluations of a run take place in its own [environment]", apart)
	}
	switch {
	case s.Reward == nil || s.Environment != nil:
	case algorithm.EnvironmentRewards(r.Config):
		conflict("reward", "is for `rollout eval` only: the environment of the run scores its episodes", apart)
	case len(reward.Models(one)) > 0:
		conflict("reward", "has a reward model, which evaluations of a run can have in [reward] only", "use the model in [reward], or "+apart)
	}
	if most, context := s.GetMaxTokens(), r.Config.GetEngine().GetMaxModelLen(); s.MaxTokens != nil && context > 0 && most >= context {
		conflict("max_tokens", "must be below `engine.max_model_len`", fmt.Sprintf("lower it, or raise `max_model_len` in [engine] from %d", context))
	}
}

// suiteMetric reports a metric `eval/SUITE/NAME` that no suite of the run has. fix may be empty.
func (r *checker) suiteMetric(metric string) (message, fix string) {
	if !r.Readable("eval.suites") || !r.Readable("eval.every_steps") {
		return "", ""
	}
	name, rest, nested := strings.Cut(strings.TrimPrefix(metric, "eval/"), "/")
	names := suite.InRun(r.Config)
	if !nested {
		if slices.Contains(names, name) {
			return fmt.Sprintf("`%s` is a suite, which has several metrics", name), fmt.Sprintf("write `%s/%s`", metric, suite.MetricsOf(r.Config.GetEval().GetSuites()[name])[0])
		}
		return "", ""
	}
	_, notSuite := suite.Parse(rest)
	if !slices.Contains(names, name) {
		if near := nearest.To(name, names); near != "" {
			return fmt.Sprintf("the run has no suite `%s`", name), fmt.Sprintf("did you mean `eval/%s/%s`?", near, rest)
		}
		if notSuite == nil {
			return fmt.Sprintf("the run has no suite `%s`", name), fmt.Sprintf("add a table [eval.suites.%s]", name)
		}
		return "", "" // a number of the reward of held-out rows
	}
	if r.unread("eval.suites." + name) {
		return "", ""
	}
	s := r.Config.GetEval().GetSuites()[name]
	known := suite.MetricsOf(s)
	base := strings.TrimSuffix(rest, "_stderr")
	switch {
	case slices.Contains(known, base) || rest == "samples" || rest == "failed":
		return "", ""
	case notSuite == nil:
		return fmt.Sprintf("the suite `%s` has no metric `%s`", name, rest), fmt.Sprintf("add %q to `metrics` in [eval.suites.%s]", rest, name)
	}
	scored := s.GetReward()
	if scored == nil {
		scored = r.Config.GetReward()
	}
	if scored.GetExpression() == "" && !strings.Contains(rest, "@") {
		return "", "" // a further number of the reward, which only the run knows
	}
	fix = fmt.Sprintf("its metrics are %s", quoted(slices.Clone(known), "and"))
	if near := nearest.To(rest, known); near != "" {
		fix = fmt.Sprintf("did you mean `eval/%s/%s`?", name, near)
	}
	return fmt.Sprintf("the suite `%s` has no metric `%s`", name, rest), fix
}
