package planner

import (
	"fmt"
	"math"

	"google.golang.org/protobuf/proto"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// mostSteps is the range of `train.steps`.
const mostSteps = 100_000_000

// trainCheck checks the number of steps and the learning rate.
type trainCheck struct {
	train    *configv1.TrainConfig
	findings findings
}

// resolve sets the steps of a run that is sized in passes over its rows of training data.
func (d *trainCheck) resolve(rows uint64) {
	train := d.train
	if train.GetEpochs() == 0 || rows == 0 || train.GetGroupsPerStep() == 0 {
		return
	}
	steps := stepsOf(train.GetEpochs(), rows, train.GetGroupsPerStep())
	if steps > mostSteps {
		d.findings.report("train.epochs", problem.OutOfRange, fmt.Sprintf("%s epochs of %d rows are %.0f steps of %d, and a run has at most %d",
			config.Decimal(train.GetEpochs()), rows, steps, train.GetGroupsPerStep(), mostSteps), "lower `epochs`, or raise `groups_per_step`")
		return
	}
	train.Steps = proto.Uint64(uint64(steps))
	if warmup := train.GetWarmupSteps(); warmup > train.GetSteps() {
		d.findings.report("train.warmup_steps", problem.Conflict, fmt.Sprintf("`train.warmup_steps` is %d, and %s epochs of %d rows are only %d steps of %d",
			warmup, config.Decimal(train.GetEpochs()), rows, train.GetSteps(), train.GetGroupsPerStep()), "lower `warmup_steps`, or raise `epochs`")
	}
}

// stepsOf is the number of steps that consume every row in each of the passes. The last step may
// begin another pass. What a product of floats is above an integer by rounding makes no step.
func stepsOf(epochs float64, rows uint64, groupsPerStep uint32) float64 {
	return max(1, math.Ceil(epochs*float64(rows)/float64(groupsPerStep)*(1-1e-12)))
}

// epochsOf are the passes over the rows that the steps of a run make. Dynamic sampling makes more.
func epochsOf(train *configv1.TrainConfig, rows uint64) float64 {
	return float64(train.GetSteps()) * float64(train.GetGroupsPerStep()) / float64(rows)
}

// Learning rates of Adam outside of these bounds are almost always mistakes: pretraining uses up to
// 6e-3 (arXiv 2203.15556), adapters up to 2e-3 (arXiv 2106.09685), and RL on language models 1e-7
// to 1e-5.
const (
	leastRate = 1e-9
	mostRate  = 1e-2
)

// learningRate warns of a learning rate far outside of the usual range.
func (d *trainCheck) learningRate() {
	const field = "train.learning_rate"
	rate := d.train.GetLearningRate()
	if !d.findings.Readable(field) || rate == 0 || rate > leastRate && rate < mostRate {
		return
	}
	effect, usual := "the first updates will destroy the model", "1e-6 for RL, 1e-5 for SFT, 1e-4 with [lora]"
	if rate <= leastRate {
		effect = "the model will hardly change"
	}
	d.findings.warn(field, problem.UnusualValue,
		fmt.Sprintf("`%s` = %g is far outside of the usual range of AdamW: %s", field, rate, effect), "start from the usual: "+usual)
}
