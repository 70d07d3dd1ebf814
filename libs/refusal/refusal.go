// Package refusal identifies runs that their controller has stopped until a person decides, as
// opposed to running ones and those paused by request.
//
// With `train.on_refused_gradient = "stop"` a learner that refuses a gradient ends its step with
// one of the gradient reasons. With `health.on_collapse = "pause"` the controller ends a step after
// which the health check found a collapse, with one of the health reasons. A gate with the action
// "pause" does the same. In these cases the controller stops, the run is PAUSED with that reason,
// and only a request (ResumeRun, CancelRun) moves it.
package refusal

import (
	"slices"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Reasons of the learner.
const (
	NonFinite = "NON_FINITE_GRADIENT"
	Exploding = "EXPLODING_GRADIENT"
)

// Reasons of the health check.
const (
	NonFiniteMetric   = "NON_FINITE_METRIC"
	RewardOutOfRange  = "REWARD_OUT_OF_RANGE"
	EntropyCollapse   = "ENTROPY_COLLAPSE"
	RewardCollapse    = "REWARD_COLLAPSE"
	GradientExplosion = "GRADIENT_EXPLOSION"
	GradientsRefused  = "GRADIENTS_REFUSED"
	KLExplosion       = "KL_EXPLOSION"
	EngineMismatch    = "ENGINE_MISMATCH"
	RatioExplosion    = "RATIO_EXPLOSION"
	LossExplosion     = "LOSS_EXPLOSION"
)

// Reasons of gates. A stop ends the run as succeeded.
const (
	StoppedByGate = "STOPPED_BY_GATE"
	PausedByGate  = "PAUSED_BY_GATE"
)

var (
	gradient = []string{NonFinite, Exploding}
	health   = []string{
		NonFiniteMetric, RewardOutOfRange, EntropyCollapse, RewardCollapse, GradientExplosion, GradientsRefused, KLExplosion,
		EngineMismatch, RatioExplosion, LossExplosion,
	}
)

// Is reports whether a reason is that of a refused gradient, of the health check, or of a gate that
// pauses.
func Is(reason string) bool {
	return slices.Contains(gradient, reason) || Health(reason) || reason == PausedByGate
}

// Health reports whether a reason is one of the health check.
func Health(reason string) bool { return slices.Contains(health, reason) }

// Paused reports whether a run is paused for one of the reasons: it makes no steps until it is
// resumed.
func Paused(run *runv1.Run) bool {
	return run.GetState() == runv1.RunState_RUN_STATE_PAUSED && Is(run.GetReason())
}
