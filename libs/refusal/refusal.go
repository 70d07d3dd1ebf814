// Package refusal identifies runs that a refused gradient has paused, as opposed to running ones
// and those paused by request.
//
// With `train.on_refused_gradient = "stop"` a learner that refuses a gradient ends its step with
// one of these reasons. The controller stops, the run is PAUSED with that reason, and nothing but a
// person's ResumeRun or CancelRun moves it.
package refusal

import runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"

// Reasons of the learner.
const (
	NonFinite = "NON_FINITE_GRADIENT"
	Exploding = "EXPLODING_GRADIENT"
)

// Is reports whether a reason is that of a refused gradient.
func Is(reason string) bool { return reason == NonFinite || reason == Exploding }

// Paused reports whether a refused gradient has paused a run: it makes no steps until it is
// resumed.
func Paused(run *runv1.Run) bool {
	return run.GetState() == runv1.RunState_RUN_STATE_PAUSED && Is(run.GetReason())
}
