package config

import (
	"fmt"
	"maps"
	"slices"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/condition"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// gates reports gates and best snapshots that could not work.
func (r *checker) gates() {
	for _, name := range slices.Sorted(maps.Keys(r.Config.GetGates())) {
		gate, field := r.Config.GetGates()[name], "gates."+name+".when"
		if gate.When == nil || !r.Readable(field) {
			continue
		}
		c, err := condition.Parse(gate.GetWhen())
		if err == nil {
			err = condition.CheckMetric(c.Metric)
		}
		if err != nil {
			wrong := condition.AsError(err)
			r.Problems.At(r.Place(field), problem.BadValue, field, fmt.Sprintf("`%s`: %s", field, wrong.Message), wrong.Fix)
			continue
		}
		if r.measured(field, c.Metric) && gate.GetAction() == "promote" {
			r.snapshotted("gates."+name+".action", c.Metric)
		}
	}
	r.restores()
	const best = "snapshot.best"
	metric := r.Config.GetSnapshot().GetBest()
	if metric == "" {
		if keep := "snapshot.keep_best"; r.Wrote(keep) && r.Readable(best) && r.Readable(keep) {
			r.Problems.At(r.Place(keep), problem.Conflict, keep, "`snapshot.keep_best` has no effect without `snapshot.best`", "write `best = \"eval/reward\"` in [snapshot], or remove it")
		}
		return
	}
	if !r.Readable(best) {
		return
	}
	if err := condition.CheckMetric(metric); err != nil {
		wrong := condition.AsError(err)
		r.Problems.At(r.Place(best), problem.BadValue, best, fmt.Sprintf("`%s`: %s", best, wrong.Message), wrong.Fix)
		return
	}
	if r.measured(best, metric) {
		r.snapshotted(best, metric)
	}
}

// restores reports gates that restore the best snapshot of a run that takes none.
func (r *checker) restores() {
	for _, name := range slices.Sorted(maps.Keys(r.Config.GetGates())) {
		field := "gates." + name + ".action"
		if r.Config.GetGates()[name].GetAction() == "restore_best" && r.Config.GetSnapshot().GetBest() == "" && r.Readable("snapshot.best") {
			r.Problems.At(r.Place(field), problem.Conflict, field, fmt.Sprintf("`%s` restores the best snapshot, but the run keeps none", field),
				"write `best = \"eval/reward\"` in [snapshot], or another metric that tells which weights are best")
		}
	}
}

// measured reports whether the run has a metric, and adds a problem if not.
func (r *checker) measured(field, metric string) bool {
	conflict := func(message, fix string) bool {
		r.Problems.At(r.Place(field), problem.Conflict, field, fmt.Sprintf("`%s` reads `%s`, but %s", field, metric, message), fix)
		return false
	}
	sampled := algorithm.Traits(r.Config).GetNeedsReward()
	switch {
	case algorithm.Name(r.Config) == "":
		return false // reported already
	case condition.Evaluated(metric) && r.Readable("eval.every_steps") && r.Config.GetEval().GetEverySteps() == 0:
		return conflict("the run has no evaluations", "write `every_steps = 10` in [eval], and `eval` in [data]")
	case metric == "eval/reward" && algorithm.TeachesHeldOut(r.Config):
		return conflict("evaluations of this run measure the loss of held-out rows", "write `eval/loss`")
	case (metric == "eval/reward" || metric == "eval/loss") && r.Config.GetMultistep() != nil:
		return conflict("evaluations of this run measure returns", "write `eval/return`")
	case metric == "eval/loss" && !algorithm.TeachesHeldOut(r.Config):
		return conflict("evaluations of this run measure rewards", "write `eval/reward`")
	case (metric == "reward/mean" || metric == "reward/std") && !sampled:
		return conflict("this algorithm has no rewards", "write `loss`, or `eval/loss` with evaluations")
	case metric == "eval/reward" && r.Config.GetData().GetEval() == "" && r.Readable("data.eval"):
		return conflict("the run has no held-out rows", "write `eval` in [data], or a metric of a suite, `eval/SUITE/METRIC`")
	}
	if condition.Evaluated(metric) {
		if message, fix := r.suiteMetric(metric); message != "" {
			return conflict(message, fix)
		}
	}
	return true
}

// snapshotted reports a snapshot of weights that reserved workers evaluate: the learner has made
// further steps when the result is known.
func (r *checker) snapshotted(field, metric string) {
	if condition.Evaluated(metric) && r.Config.GetEval().GetWorkers() > 0 {
		r.Problems.At(r.Place(field), problem.Conflict, field,
			fmt.Sprintf("`%s` takes a snapshot after an evaluation, but with `eval.workers` the learner has made further steps by then", field),
			"remove `workers` from [eval], or use the actions `stop` and `pause`")
	}
}
