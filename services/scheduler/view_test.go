package scheduler

import (
	"fmt"
	"testing"
	"time"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
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
		v.crowd.put("learner-0", workerView{kind: "learner"})
		v.crowd.put("inference-0", workerView{kind: "inference"})
	})
	step(1, "inference-0 and learner-0 to load the model (worker process)", func() {
		v.crowd.put("learner-0", workerView{kind: "learner", process: "p7"})
		v.crowd.put("inference-0", workerView{kind: "inference", process: "p8"})
	})
	step(5, "inference-0 and learner-0 to load the model (worker process)", func() {})
	if since := v.status().GetWaitingSince().AsTime(); !since.Equal(noon.Add(time.Second)) {
		t.Errorf("since %v", since)
	}
	for _, wait := range v.status().GetWaits() {
		if wait.GetOwner() != "worker" || wait.GetReason() != "WORKER_LOADING" || !wait.GetSince().AsTime().Equal(noon.Add(time.Second)) {
			t.Errorf("wait: %v", wait)
		}
	}
	step(6, "inference-0 to be started again (scheduler): it left with code 1; learner-0 to load the model (worker process)", func() {
		v.crowd.put("inference-0", workerView{kind: "inference", why: "left with code 1"})
	})
	step(7, "a learner worker (scheduler starts it)", func() { // the controller has not seen it yet
		v.crowd.put("learner-0", workerView{kind: "learner", process: "p7", address: "host:1"})
		v.crowd.put("inference-0", workerView{kind: "inference", process: "p8", address: "host:2"})
	})
	step(8, "", func() { v.progress = &learnerv1.Progress{} })
	if since := v.status().GetWaitingSince(); since != nil {
		t.Errorf("it waits for nothing since %v", since.AsTime())
	}
	if waits := v.status().GetWaits(); len(waits) != 0 {
		t.Errorf("waits: %v", waits)
	}
}

// Of a large fleet some are named.
func TestWaitsOfMany(t *testing.T) {
	t.Parallel()
	c := newCrowd()
	for n := range 1000 {
		c.put(fmt.Sprintf("inference-%03d", n), workerView{kind: "inference"})
	}
	want := "inference-000, inference-001, inference-002 and 997 more to be started (scheduler)"
	if got := c.absent(); len(got.waits) != 1 || got.waits[0].GetEvidence() != want || got.learner {
		t.Errorf("%v, want %q", got, want)
	}
}

// Who waits for a worker is woken for it alone, and not by what it says of itself.
func TestCrowdWakesForOneWorker(t *testing.T) {
	t.Parallel()
	c := newCrowd()
	c.put("a", workerView{kind: "inference"})
	c.put("b", workerView{kind: "inference"})
	woken := c.changes("a")
	c.put("b", workerView{kind: "inference", process: "p3"})
	c.put("a", workerView{kind: "inference", status: &inferencev1.GetInferenceStatusResponse{Samples: 5}})
	select {
	case <-woken:
		t.Fatal("woken for nothing")
	default:
	}
	told := c.absent()
	c.put("a", workerView{kind: "inference", process: "p4"})
	select {
	case <-woken:
	default:
		t.Fatal("not woken")
	}
	if c.absent() == told {
		t.Error("what is told is that of before")
	}
}
