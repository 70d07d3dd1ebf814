package controller

import (
	"fmt"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// tellDraws adds to a step's metrics what dynamic sampling did: the share of groups that were left out for equal rewards, how many
// batches' worth of groups it took, and the mean reward of all that was sampled, which that of the batch is not any more.
func (s settings) tellDraws(batch *bufferv1.Batch, all map[string]float64) {
	if s.draws == 0 {
		return
	}
	groups, zero := float64(batch.GetGroups()), float64(batch.GetZeroAdvantage())
	drawn := groups + float64(batch.GetExcluded())
	all["dynamic_sampling/excluded"] = zero / drawn
	all["dynamic_sampling/rounds"] = drawn / float64(s.cfg.GetTrain().GetGroupsPerStep())
	if mean, ok := all["reward/mean"]; ok {
		all["reward/sampled"] = (mean*groups + batch.GetZeroAdvantageReward()*zero) / (groups + zero)
	}
}

// watchDraws warns of a step that found too few groups whose rewards differ.
func (d *drive) watchDraws(batch *bufferv1.Batch) {
	want := d.set.cfg.GetTrain().GetGroupsPerStep()
	if d.set.draws == 0 || batch.GetGroups() >= want {
		return
	}
	d.emit(&eventv1.Event{
		Kind: "step.short", Level: eventv1.Level_LEVEL_WARN, Step: batch.GetStep(),
		Message: fmt.Sprintf("step %d trained on %d groups in place of %d: of the %d that it may draw (sampling.refill_rounds = %d) all rewards were equal in %d, "+
			"their mean is %.4g", batch.GetStep(), batch.GetGroups(), want, batch.GetGroups()+batch.GetExcluded(), d.set.draws,
			batch.GetZeroAdvantage(), batch.GetZeroAdvantageReward()),
		Metrics: map[string]float64{
			"groups": float64(batch.GetGroups()), "zero_advantage": float64(batch.GetZeroAdvantage()), "reward/zero_advantage": batch.GetZeroAdvantageReward(),
		},
	})
}
