package scheduler

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/wait"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// A wait names what is waited for, the owner, and since when; workers with the same wait are one
// sentence.
func TestWaits(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	v := newView(&Run{State: Starting})
	v.progress = &learnerv1.Progress{Waits: []*waitv1.Wait{{Owner: "scheduler", Reason: "PREPARING", Evidence: "a learner worker (scheduler starts it)"}}}
	step := func(seconds int, want string, change func()) {
		t.Helper()
		change()
		v.settle(noon.Add(time.Duration(seconds) * time.Second))
		if got := v.status().GetWaitingFor(); got != want {
			t.Errorf("after %d s it waits for %q, want %q", seconds, got, want)
		}
	}
	step(0, "inference-0 and learner-0 to be started (scheduler)", func() {
		v.fleet.put("learner-0", workerView{kind: "learner"})
		v.fleet.put("inference-0", workerView{kind: "inference"})
	})
	step(1, "inference-0 and learner-0 to load the model (worker process)", func() {
		v.fleet.put("learner-0", workerView{kind: "learner", process: "p7"})
		v.fleet.put("inference-0", workerView{kind: "inference", process: "p8"})
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
	step(6, "inference-0 to be restarted (scheduler): it left with code 1; learner-0 to load the model (worker process)", func() {
		v.fleet.put("inference-0", workerView{kind: "inference", why: "left with code 1"})
	})
	step(7, "a learner worker (scheduler starts it)", func() { // the controller has not seen it yet
		v.fleet.put("learner-0", workerView{kind: "learner", process: "p7", address: "host:1"})
		v.fleet.put("inference-0", workerView{kind: "inference", process: "p8", address: "host:2"})
	})
	step(8, "", func() { v.progress = &learnerv1.Progress{} })
	if since := v.status().GetWaitingSince(); since != nil {
		t.Errorf("it waits for nothing since %v", since.AsTime())
	}
	if waits := v.status().GetWaits(); len(waits) != 0 {
		t.Errorf("waits: %v", waits)
	}
}

// The wait for agents says what they connect to.
func TestWaitForAgents(t *testing.T) {
	t.Parallel()
	v := newView(&Run{State: Running})
	v.progress = &learnerv1.Progress{Phase: learnerv1.Phase_PHASE_LEASING, Waits: []*waitv1.Wait{{Owner: "agents", Reason: "GROUPS_MISSING", Evidence: "8 of 10 groups of step 4 (agents)"}}}
	for gateway, want := range map[string]string{
		"":                      "start an agent that takes prompts from the gateway, or see why the running ones close no sessions",
		"http://127.0.0.1:8000": "start an agent that takes prompts from http://127.0.0.1:8000, or see why the running ones close no sessions",
	} {
		v.gateway = gateway
		v.settle(time.Now())
		got := v.status().GetWaits()
		if len(got) != 1 || got[0].GetOwner() != "agents" || got[0].GetReason() != "GROUPS_MISSING" || got[0].GetFix() != want ||
			got[0].GetEvidence() != "8 of 10 groups of step 4 (agents): "+want {
			t.Errorf("got %v", got)
		}
	}
}

// The summary of a large fleet names a few workers.
func TestWaitsOfMany(t *testing.T) {
	t.Parallel()
	c := newFleet()
	for n := range 1000 {
		c.put(fmt.Sprintf("inference-%03d", n), workerView{kind: "inference"})
	}
	want := "inference-000, inference-001, inference-002 and 997 more to be started (scheduler)"
	if got := c.absent("run-1"); len(got.waits) != 1 || got.waits[0].GetEvidence() != want || got.learner {
		t.Errorf("%v, want %q", got, want)
	}
}

// Workers that wait for an operator are counted by kind, with the fix of their launcher.
func TestWaitsForExternalWorkers(t *testing.T) {
	t.Parallel()
	c := newFleet()
	awaits := launch.Awaited{Owner: wait.User, Reason: wait.WorkerAwaited, What: "external inference worker", Fix: "start them"}
	c.put("inference-0", workerView{kind: "inference", awaits: awaits, why: "was lost"})
	c.put("inference-1", workerView{kind: "inference", awaits: awaits})
	awaits.What, awaits.Detail = "Slurm job", "job 7: Resources"
	c.put("learner-0", workerView{kind: "learner", awaits: awaits})
	var got []string
	for _, w := range c.absent("run-1").waits {
		if w.GetOwner() != wait.User || w.GetReason() != wait.WorkerAwaited || w.GetFix() != "start them" {
			t.Errorf("wait %v", w)
		}
		got = append(got, w.GetEvidence())
	}
	if want := []string{"2 external inference workers for inference-0 and inference-1", "1 Slurm job for learner-0 (job 7: Resources)"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got := c.workers["inference-0"].activity(); got != "waits for an external inference worker" {
		t.Error(got)
	}
}

// A waiter for a worker is woken by that worker alone, and not by its status.
func TestFleetWakesWaitersOfOneWorker(t *testing.T) {
	t.Parallel()
	c := newFleet()
	c.put("a", workerView{kind: "inference"})
	c.put("b", workerView{kind: "inference"})
	woken := c.changes("a")
	c.put("b", workerView{kind: "inference", process: "p3"})
	c.put("a", workerView{kind: "inference", status: &inferencev1.GetInferenceStatusResponse{Samples: 5}})
	select {
	case <-woken:
		t.Fatal("woken without a change")
	default:
	}
	before := c.absent("run-1")
	c.put("a", workerView{kind: "inference", process: "p4"})
	select {
	case <-woken:
	default:
		t.Fatal("not woken")
	}
	if c.absent("run-1") == before {
		t.Error("the summary was not made again")
	}
}

// The status of a worker shows that an update of the weights left it out.
func TestAWorkerThatLagsIsNamed(t *testing.T) {
	t.Parallel()
	v := newView(&Run{State: Running})
	v.fleet.put("inference-0", workerView{kind: "inference", process: "p1", address: "host:1", status: &inferencev1.GetInferenceStatusResponse{Activity: "sampling"}})
	v.fleet.put("inference-1", workerView{kind: "inference", process: "p2", address: "host:2", status: &inferencev1.GetInferenceStatusResponse{Activity: "sampling"}})
	v.progress = &learnerv1.Progress{Lagging: []*learnerv1.LaggingWorker{{WorkerId: "inference-1", Version: 4, Message: "no space"}}}
	workers := v.status().GetWorkers()
	if got := workers[0].GetActivity(); got != "sampling" {
		t.Errorf("inference-0 %s", got)
	}
	if got := workers[1].GetActivity(); got != "could not load weights version 4 and tries again: no space" {
		t.Errorf("inference-1 %s", got)
	}
}
