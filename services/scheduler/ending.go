package scheduler

import (
	"errors"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// ending is how a run ends. It is an error so that parts can return it.
type ending struct {
	state           State
	reason, message string
}

// handOver is no end: the conductor leaves the run as it is recorded, for the next one to go on with.
var handOver = &ending{reason: "HAND_OVER", message: "the next incarnation goes on"}

func (e *ending) Error() string { return e.reason + ": " + e.message }

// failure turns what stopped a part into the run's ending.
func failure(err error) *ending {
	var e *ending
	if errors.As(err, &e) {
		return e
	}
	var loop *launch.CrashLoop
	if errors.As(err, &loop) {
		return &ending{state: Failed, reason: "WORKER_CRASH_LOOP", message: loop.Error()}
	}
	reason := rpcerr.Reason(err)
	if reason == "" {
		reason = rpcerr.ReasonInternal
	}
	return &ending{state: Failed, reason: reason, message: rpcerr.Text(err)}
}
