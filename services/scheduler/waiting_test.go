package scheduler_test

import (
	"slices"
	"strings"
	"testing"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
)

// Threads that spin pay where nobody else wants the cores: a run beside another, and engine and learner of an async run, sleep.
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

// Whatever else a run waits for while NATS is away, it is told that it is.
func TestAWaitForNATSIsTold(t *testing.T) {
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
