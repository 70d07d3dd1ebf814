package health

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/refusal"
)

// Names of metrics (python/rollout_workers/trainer/metrics.py).
const (
	entropy         = "entropy"
	loss            = "loss"
	gradNorm        = "grad_norm"
	rewardMean      = "reward/mean"
	rewardDeviation = "reward/std"
	klReference     = "kl/reference"
	klEngine        = "mismatch/kl"
)

// check is one way in which a run collapses. broken reports whether the metrics of a step cross its
// threshold, and describes that.
type check struct {
	reason string
	atOnce bool // one step is enough
	broken func(m *Monitor, metrics map[string]float64) (Finding, bool)
}

var checks = []check{
	{refusal.NonFiniteMetric, true, nonFinite},
	{refusal.RewardOutOfRange, true, rewardOutOfRange},
	{refusal.EntropyCollapse, false, entropyCollapse},
	{refusal.RewardCollapse, false, rewardCollapse},
	{refusal.GradientExplosion, false, gradientExplosion},
	{refusal.GradientsRefused, false, gradientsRefused},
	{refusal.KLExplosion, false, klExplosion},
	{refusal.EngineMismatch, false, engineMismatch},
	{refusal.RatioExplosion, false, ratioExplosion},
	{refusal.LossExplosion, false, lossExplosion},
}

const lowerRate = "start again from a healthy snapshot with a lower `train.learning_rate`"

// rate names the learning rate of a step as the likely cause.
func rate(metrics map[string]float64) string {
	if value, ok := metrics["learning_rate"]; ok {
		return fmt.Sprintf("the learning rate is too high (%.3g at this step)", value)
	}
	return "the learning rate is too high"
}

func nonFinite(_ *Monitor, metrics map[string]float64) (Finding, bool) {
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		if value := metrics[name]; !finite(value) {
			return Finding{
				Metric: name, Value: value, What: fmt.Sprintf("the metric %s is %g, not a number that can be used", name, value),
				Cause: "a reward, a logprob, or a weight overflowed", Fix: "look at the completions of this step; lower `train.learning_rate`, or bound the reward",
			}, true
		}
	}
	return Finding{}, false
}

func rewardOutOfRange(m *Monitor, metrics map[string]float64) (Finding, bool) {
	limit := m.cfg.GetRewardLimit()
	for _, name := range []string{rewardMean, rewardDeviation} {
		if value := metrics[name]; m.sampled && limit > 0 && math.Abs(value) > limit {
			return Finding{
				Metric: name, Value: value, Limit: limit, What: fmt.Sprintf("%s is %.4g: its magnitude is above `health.reward_limit` = %.4g", name, value, limit),
				Cause: "the reward function returns a number that is not a score, such as a sum, a timestamp, or a sentinel",
				Fix:   "bound the reward, for example to 0..1: advantages are float32, and one such sample outweighs all others",
			}, true
		}
	}
	return Finding{}, false
}

func entropyCollapse(m *Monitor, metrics map[string]float64) (Finding, bool) {
	value, ok := metrics[entropy]
	first, known := m.state.First[entropy]
	limit := m.cfg.GetEntropyShare() * first
	if !ok || !known || !m.sampled || !(value < limit) || m.improved() {
		return Finding{}, false
	}
	return Finding{
		Metric: entropy, Value: value, Limit: limit,
		What: fmt.Sprintf("the entropy of the policy collapsed: %.4g nats per token, below %.3g times the %.4g of the first step, and the reward has not improved",
			value, m.cfg.GetEntropyShare(), first),
		Cause: rate(metrics) + ", or the reward prefers one answer to all prompts",
		Fix:   lowerRate + bonus(m) + ", or raise `sampling.temperature`",
	}, true
}

// bonus suggests an entropy bonus where the algorithm has one and it is not set.
func bonus(m *Monitor) string {
	const key = "entropy_coefficient"
	if value, ok := algorithm.Setting(m.run, key); ok && value.Float() == 0 {
		return fmt.Sprintf(", write `%s = 0.001` in [algorithm.%s]", key, algorithm.Name(m.run))
	}
	return ""
}

func rewardCollapse(m *Monitor, metrics map[string]float64) (Finding, bool) {
	now, ok := m.rewardOf(metrics)
	best := m.state.Best
	if !ok || best == nil || m.cfg.GetRewardDeviations() == 0 {
		return Finding{}, false
	}
	drop := max(m.cfg.GetRewardDeviations()*best.Error, m.cfg.GetRewardDrop()*math.Abs(best.Mean))
	limit := best.Mean - drop
	if drop == 0 || !(now.Mean < limit) {
		return Finding{}, false
	}
	return Finding{
		Metric: rewardMean, Value: now.Mean, Limit: limit,
		What:  fmt.Sprintf("the reward collapsed: a mean of %.4g, below %.4g, after a best mean of %.4g", now.Mean, limit, best.Mean),
		Cause: rate(metrics) + ", or the reward or its data changed",
		Fix:   "look at the completions (`rollout completions`); " + lowerRate + reference(m),
	}, true
}

// reference suggests a KL term where the algorithm has one and it is not set.
func reference(m *Monitor) string {
	const key = "kl_coefficient"
	if value, ok := algorithm.Setting(m.run, key); ok && value.Float() == 0 {
		return fmt.Sprintf(", or hold the policy near the initial model: `%s = 0.01` in [algorithm.%s]", key, algorithm.Name(m.run))
	}
	return ""
}

func gradientExplosion(m *Monitor, metrics map[string]float64) (Finding, bool) {
	value, ok := metrics[gradNorm]
	factor := m.cfg.GetGradNormFactor()
	if !ok || factor == 0 || len(m.state.Norms) < max(2, int(m.cfg.GetWindow())/2) {
		return Finding{}, false
	}
	usual := median(m.state.Norms)
	limit := max(factor*usual, m.run.GetTrain().GetMaxGradNorm())
	if !(value > limit) {
		return Finding{}, false
	}
	return Finding{
		Metric: gradNorm, Value: value, Limit: limit,
		What: fmt.Sprintf("the gradient exploded: a norm of %.4g, above %.3g times the median %.4g of the last %d steps and above `train.max_grad_norm` = %.3g",
			value, factor, usual, len(m.state.Norms), m.run.GetTrain().GetMaxGradNorm()),
		Cause: rate(metrics) + ", or some rows or rewards are far from the others",
		Fix:   lowerRate + " or `train.max_grad_norm`, or refuse such gradients with `train.refuse_grad_norm`",
	}, true
}

func gradientsRefused(_ *Monitor, metrics map[string]float64) (Finding, bool) {
	if metrics["refused"] == 0 {
		return Finding{}, false
	}
	return Finding{
		Metric: "refused", Value: 1, What: "the learner refused the gradient, so the weights did not change",
		Cause: "the weights or the batches give no finite gradient, or `train.refuse_grad_norm` is too low",
		Fix:   lowerRate + "; the refused batches are in the folder `refused` of the run",
	}, true
}

func klExplosion(m *Monitor, metrics map[string]float64) (Finding, bool) {
	value, limit := metrics[klReference], m.cfg.GetKlReference()
	if limit == 0 || !(value > limit) {
		return Finding{}, false
	}
	return Finding{
		Metric: klReference, Value: value, Limit: limit,
		What:  fmt.Sprintf("the policy left the initial model: a KL divergence of %.4g nats per token, above `health.kl_reference` = %.3g", value, limit),
		Cause: rate(metrics) + ", or the KL term is too weak",
		Fix:   lowerRate + fmt.Sprintf(", or a higher `kl_coefficient` in [algorithm.%s]", algorithm.Name(m.run)),
	}, true
}

func engineMismatch(m *Monitor, metrics map[string]float64) (Finding, bool) {
	value, limit := metrics[klEngine], m.cfg.GetKlEngine()
	if limit == 0 || !m.sampled || !(value > limit) {
		return Finding{}, false
	}
	cause := "engine and learner compute different logprobs, for example in another data type, or the weights overflow"
	fix := "compare `model.dtype` of both, or write `model.dtype = \"float32\"`"
	if m.run.GetMode() == "async" {
		cause, fix = "the policy moves too far between the weights that sampled and those that are trained", "lower `staleness.max_steps` or `train.learning_rate`"
	}
	return Finding{
		Metric: klEngine, Value: value, Limit: limit,
		What:  fmt.Sprintf("the learner and the engine that sampled disagree: a KL divergence of %.4g nats per token, above `health.kl_engine` = %.3g", value, limit),
		Cause: cause, Fix: fix,
	}, true
}

func ratioExplosion(m *Monitor, metrics map[string]float64) (Finding, bool) {
	limit := m.cfg.GetClippedShare()
	for _, name := range []string{"clip_fraction", "importance/bounded"} {
		if value := metrics[name]; m.sampled && limit > 0 && value > limit {
			return Finding{
				Metric: name, Value: value, Limit: limit,
				What:  fmt.Sprintf("the probability ratio left its bounds: %s is %.3g, above `health.clipped_share` = %.3g, so almost no token has a gradient", name, value, limit),
				Cause: rate(metrics) + ", or a batch is used for too many updates",
				Fix:   lowerRate + ", or lower `epochs` or `minibatches` of the algorithm, or `staleness.max_steps`",
			}, true
		}
	}
	return Finding{}, false
}

func lossExplosion(m *Monitor, metrics map[string]float64) (Finding, bool) {
	value, ok := metrics[loss]
	first, known := m.state.First[loss]
	factor := m.cfg.GetLossFactor()
	if !ok || !known || factor == 0 || !algorithm.FromData(m.run) {
		return Finding{}, false
	}
	limit := max(factor*first, first+1)
	if !(value > limit) {
		return Finding{}, false
	}
	return Finding{
		Metric: loss, Value: value, Limit: limit,
		What:  fmt.Sprintf("the loss exploded: %.4g, above %.4g, after %.4g at the first step", value, limit, first),
		Cause: rate(metrics) + ", or some rows are broken", Fix: lowerRate + " or a longer `train.warmup_steps`",
	}, true
}
