package scheduler

import (
	"testing"
	"time"

	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
)

// A wait names what is waited for, who owns that and since when; workers that wait for the same are told together.
func TestWaits(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	v := newView(&Run{State: Starting})
	v.progress = &learnerv1.Progress{WaitingFor: "a learner worker (scheduler starts it)"}
	step := func(seconds int, want string, change func()) {
		t.Helper()
		change()
		v.settle(noon.Add(time.Duration(seconds) * time.Second))
		if got := v.status().GetWaitingFor(); got != want {
			t.Errorf("after %d s it waits for %q, want %q", seconds, got, want)
		}
	}
	step(0, "inference-0 and learner-0 to be started (scheduler)", func() {
		v.workers["learner-0"], v.workers["inference-0"] = workerView{kind: "learner"}, workerView{kind: "inference"}
	})
	step(1, "inference-0 and learner-0 to load the model (worker process)", func() {
		v.workers["learner-0"], v.workers["inference-0"] = workerView{kind: "learner", pid: 7}, workerView{kind: "inference", pid: 8}
	})
	step(5, "inference-0 and learner-0 to load the model (worker process)", func() {})
	if since := v.status().GetWaitingSince().AsTime(); !since.Equal(noon.Add(time.Second)) {
		t.Errorf("since %v", since)
	}
	step(6, "inference-0 to be started again (scheduler): it left with code 1; learner-0 to load the model (worker process)", func() {
		v.workers["inference-0"] = workerView{kind: "inference", why: "left with code 1"}
	})
	step(7, "a learner worker (scheduler starts it)", func() { // the controller has not seen it yet
		v.workers["learner-0"] = workerView{kind: "learner", pid: 7, address: "host:1", dataPID: "7"}
		v.workers["inference-0"] = workerView{kind: "inference", pid: 8, address: "host:2", dataPID: "8"}
	})
	step(8, "", func() { v.progress = &learnerv1.Progress{} })
	if since := v.status().GetWaitingSince(); since != nil {
		t.Errorf("it waits for nothing since %v", since.AsTime())
	}
}
