package scheduler_test

import (
	"slices"
	"testing"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// The process that writes to the trackers is started a few times if it crashes, and the run
// continues.
func TestCrashesOfTrackersDoNotAffectTheRun(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true
	p := plan(5, "sync", 0, false)
	p.Config.Sinks = &configv1.SinksConfig{Tensorboard: &configv1.TensorboardConfig{}}
	started, failed := make(chan struct{}, 8), make(chan struct{}, 8)
	w.launcher.onLaunch = func(spec *runv1.WorkerSpec) {
		if spec.GetKind() == "sinks" {
			started <- struct{}{}
		}
	}
	w.events.onEmit = func(e *eventv1.Event) {
		if e.GetKind() == "sink.failed" {
			failed <- struct{}{}
		}
	}
	w.start()
	run := w.create(p).GetRunId()
	for range 3 {
		<-started
		w.launcher.crash("sinks-0", launch.Exit{Code: 1, LastLines: []string{"ImportError: no wandb"}})
		<-failed
	}
	for _, why := range w.events.of("sink.failed", "error") {
		if why != "exited with code 1; its last line: ImportError: no wandb" {
			t.Error(why)
		}
	}
	status, err := w.generation.GetRun(t.Context(), &runv1.GetRunRequest{RunId: run})
	if err != nil || status.GetStatus().GetRun().GetState() == scheduler.Failed {
		t.Fatalf("%v, %v", status, err)
	}
	for _, worker := range status.GetStatus().GetWorkers() {
		if worker.GetKind() == "sinks" {
			t.Errorf("the process of the trackers counts as a worker: %v", worker)
		}
	}
	if spec := w.launcher.spec("sinks-0", 0); spec.GetKind() != "sinks" || spec.GetRunId() != run || spec.GetThreads() != 1 || !credentials(t, spec) {
		t.Errorf("spec %v", spec)
	}
	w.launcher.mu.Lock()
	for i, command := range w.launcher.commands { // it has no link to NATS, and no business with the credentials
		linked := w.launcher.specs[i].GetKind() != "sinks"
		if spec := w.launcher.specs[i]; slices.Contains(command.Env, "NATS_PASSWORD=x") != linked || (spec.GetNatsToken() != "") != linked || (spec.GetNats() != nil) != linked {
			t.Errorf("%s: %v with %v", spec.GetWorkerId(), spec, command.Env)
		}
	}
	w.launcher.mu.Unlock()
	if w.launcher.spec("sinks-0", 3) != nil {
		t.Error("it was started once more")
	}
}

// The process outlives the run, which does not wait for it. It stops with the service.
func TestTrackersOutliveTheRun(t *testing.T) {
	t.Parallel()
	w := setup(t)
	p := plan(5, "sync", 0, false)
	p.Config.Sinks = &configv1.SinksConfig{Mlflow: &configv1.MlflowConfig{}}
	g := w.start()
	w.waitState(w.create(p).GetRunId(), scheduler.Succeeded)
	left := w.launcher.processes()
	if len(left) != 1 || left[0].spec.GetKind() != "sinks" {
		t.Fatalf("left are %d processes", len(left))
	}
	g.stop()
	if left := w.launcher.processes(); len(left) != 0 {
		t.Errorf("%d processes outlive the service", len(left))
	}
}

func TestNoProcessWithoutTrackers(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	w.waitState(w.create(plan(5, "sync", 0, false)).GetRunId(), scheduler.Succeeded)
	if w.launcher.spec("sinks-0", 0) != nil {
		t.Error("trackers were started")
	}
}
