package config

import (
	"errors"
	"fmt"
	"slices"

	"github.com/rollout-rl/rollout/libs/algorithm"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/suite"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// suites reports suites that can't be evaluated.
func (r *checker) suites() {
	for _, name := range suite.Names(r.Config) {
		s, table := r.Config.GetEval().GetSuites()[name], "eval.suites."+name
		if r.unread(table) {
			continue
		}
		field := func(key string) string { return table + "." + key }
		missing := func(key, message, fix string) {
			r.Problems.At(r.Place(field(key)), problem.MissingKey, field(key), fmt.Sprintf("[%s] %s", table, message), fix)
		}
		conflict := func(key, message, fix string) {
			r.Problems.At(r.Place(field(key)), problem.Conflict, field(key), fmt.Sprintf("`%s` %s", field(key), message), fix)
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
		if s.GetSamples() > 1 && s.Temperature != nil && s.GetTemperature() == 0 && r.Readable(field("samples")) && r.Readable(field("temperature")) {
			conflict("temperature", "is 0, which gives equal samples of a row", "write `temperature = 1.0`, or `samples = 1`")
		}
		if s.Baseline != nil && err == nil && !slices.ContainsFunc(metrics, func(m suite.Metric) bool { return m.Kind == suite.WinRate }) {
			conflict("baseline", "has no effect without the metric `win_rate`", "write `metrics = [\"win_rate\"]`, or remove it")
		}
	}
}
