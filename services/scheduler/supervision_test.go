package scheduler_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/worker"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
)

// A process that registers as a worker of the run with an old proof or none is neither used nor
// verified for the controller. The launched process is accepted although it registers another PID.
func TestOnlyTheLaunchedProcessIsAccepted(t *testing.T) {
	w := setup(t)
	w.mesh.do(func() { w.mesh.held = true })
	w.start()
	run := w.create(plan(5, "sync", 0, false)).GetRunId()
	healthy := func(s *runv1.RunStatus) bool {
		return len(s.GetWorkers()) == 2 && s.GetWorkers()[0].GetHealthy() && s.GetWorkers()[1].GetHealthy()
	}
	status := w.wait(run, healthy)
	if got := status.GetWorkers()[0]; got.GetAddress() == "" || got.GetProcessId() == "" || got.GetPid() == 0 {
		t.Errorf("worker %v", got)
	}
	spec, address := w.launcher.spec("inference-0", 0), status.GetWorkers()[0].GetAddress()
	verified := func(incarnation uint32, proof string, rank uint32) bool {
		t.Helper()
		resp, err := w.generation.internal.VerifyWorkers(t.Context(), &runv1.VerifyWorkersRequest{
			RunId: run, Incarnation: incarnation,
			Workers: []*runv1.WorkerRegistration{{WorkerId: "inference-0", Rank: rank, Address: address, Proof: proof}, {WorkerId: "none"}},
		})
		if err != nil || len(resp.GetAccepted()) != 2 || resp.GetAccepted()[1] {
			t.Fatalf("%v, %v", resp, err)
		}
		return resp.GetAccepted()[0]
	}
	good := worker.Proof(spec.GetNonce(), "inference-0", 0, address)
	if !verified(1, good, 0) || !verified(1, worker.Proof(spec.GetNonce(), "inference-0", 3, address), 3) {
		t.Error("the launched process was not accepted")
	}
	if verified(2, good, 0) || verified(1, good, 1) || verified(1, "", 0) || verified(1, worker.Proof(worker.NewNonce(), "inference-0", 0, address), 0) {
		t.Error("another process was accepted")
	}

	w.registry.change("inference-worker", func(list []discovery.Instance) []discovery.Instance {
		list[0].Address = "elsewhere:1"
		return list
	})
	if got := w.wait(run, func(s *runv1.RunStatus) bool { return !healthy(s) }).GetWorkers()[0]; got.GetAddress() != "" || got.GetProcessId() == "" {
		t.Errorf("worker %v", got)
	}
	w.generation.stop()
	for _, events := range [][]string{w.events.of("worker.started", "process"), w.events.of("worker.started", "pid")} {
		if len(events) != 2 || events[0] == "" {
			t.Errorf("events %q", events)
		}
	}
}

// Spinning threads pay only if nothing else needs the cores: the threads of two parallel runs
// sleep, and so do those of engine and learner in async mode.
func TestOnlyARunThatIsAloneSpins(t *testing.T) {
	t.Parallel()
	for mode, wants := range map[string][]bool{"sync": {true, false}, "async": {false}} {
		w := setup(t)
		w.mesh.held = true // no run ends
		w.start()
		for _, want := range wants {
			run := w.create(plan(4, mode, 1, false))
			w.wait(run.GetRunId(), func(s *runv1.RunStatus) bool {
				return len(s.GetWorkers()) == 2 && s.GetWorkers()[0].GetHealthy() && s.GetWorkers()[1].GetHealthy()
			})
			w.launcher.mu.Lock()
			for _, command := range w.launcher.commands {
				spins := slices.ContainsFunc(command.Env, func(v string) bool { return strings.HasPrefix(v, "GOMP_SPINCOUNT=") })
				if strings.HasPrefix(command.Log, run.GetDirectory()) && spins != want {
					t.Errorf("%s: a worker spins: %t, want %t", mode, spins, want)
				}
			}
			w.launcher.mu.Unlock()
		}
	}
}

func TestInferenceWorkersRunInTheEnvironmentOfTheirEngine(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true // no run ends
	w.start()
	p := plan(4, "sync", 1, false)
	p.Config.Engine.Python = proto.String("env/bin/python")
	run := w.create(p)
	w.wait(run.GetRunId(), func(s *runv1.RunStatus) bool {
		return len(s.GetWorkers()) == 2 && s.GetWorkers()[0].GetHealthy() && s.GetWorkers()[1].GetHealthy()
	})
	w.launcher.mu.Lock()
	defer w.launcher.mu.Unlock()
	wants := map[string][]string{
		"learner":   {"worker", "learner"},
		"inference": {filepath.Join(w.dir, "env/bin/python"), "-P", "-m", "rollout_workers", "inference"},
	}
	for n, command := range w.launcher.commands {
		if want := wants[w.launcher.specs[n].GetKind()]; !slices.Equal(command.Args, want) {
			t.Errorf("%s: command %q, want %q", w.launcher.specs[n].GetWorkerId(), command.Args, want)
		}
	}
}

// While NATS is unavailable, the run shows that as a wait, in addition to its other waits.
func TestWaitForNATSIsShown(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true // no run ends
	w.start()
	run := w.create(plan(4, "sync", 1, false))
	w.wait(run.GetRunId(), func(s *runv1.RunStatus) bool { return s.GetRun().GetState() == scheduler.Running })
	for _, away := range []bool{true, false} {
		w.mesh.do(func() { w.mesh.busAway = away })
		w.wait(run.GetRunId(), func(s *runv1.RunStatus) bool {
			return strings.Contains(s.GetWaitingFor(), "NATS to answer again (its servers): ") == away
		})
	}
}
