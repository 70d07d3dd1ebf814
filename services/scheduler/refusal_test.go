package scheduler_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	"github.com/rollout-rl/rollout/libs/refusal"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
)

// refused makes a world whose controller has stopped because the learner refused the gradient of
// step 1.
func refused(t *testing.T) (*world, string) {
	t.Helper()
	w, run := idle(t, plan(4, "sync", 0, false))
	w.refuse(run, 0)
	w.refuse(run, 1)
	w.refuse(run, 1)
	w.waitState(run, scheduler.Paused)
	return w, run
}

// refuse is what the controller of an incarnation says then.
func (w *world) refuse(run string, incarnation uint32) {
	w.t.Helper()
	if _, err := w.generation.internal.CompleteRun(w.t.Context(), &runv1.CompleteRunRequest{
		RunId: run, Fence: fencetest.Controller(incarnation, 1), State: scheduler.Paused, Reason: refusal.Exploding, Message: "step 1: kept in step-000001.npz",
	}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) resume(run string) *scheduler.Run {
	w.t.Helper()
	got, err := w.generation.ResumeRun(w.t.Context(), &runv1.ResumeRunRequest{RunId: run})
	if err != nil {
		w.t.Fatal(err)
	}
	return got.GetRun()
}

// A refused gradient pauses the run: the end of backpressure, PauseRun, and the next scheduler do
// not continue it, and its workers stay. ResumeRun tries the step again in the next incarnation;
// reports of the earlier one are ignored.
func TestRefusedGradientPausesUntilResumeRun(t *testing.T) {
	t.Parallel()
	w, run := refused(t)
	w.mesh.do(func() { w.mesh.stalled = "DISK_FULL" })
	w.mesh.do(func() { w.mesh.stalled = "" })
	got, err := w.generation.PauseRun(t.Context(), &runv1.PauseRunRequest{RunId: run})
	if err != nil || got.GetRun().GetReason() != refusal.Exploding {
		t.Fatalf("paused as well: %v, %v", got, err)
	}
	status := w.waitState(run, scheduler.Paused)
	if waits := status.GetWaitingFor(); !strings.Contains(waits, "rollout runs resume "+run) || !strings.Contains(waits, "rollout run --config FILE --from "+run) || !strings.Contains(waits, "step-000001.npz") {
		t.Errorf("waits for %q", waits)
	}
	if n := len(w.launcher.processes()); n != 2 {
		t.Errorf("%d workers", n)
	}
	if s := w.events.of("run.state", "state"); !slices.Equal(s[len(s)-2:], []string{"RUNNING", "PAUSED"}) {
		t.Errorf("states %v", s)
	}

	w.kill()
	w.config.ResumeOnStart = true
	w.start()
	status = w.wait(run, func(s *runv1.RunStatus) bool {
		return s.GetRun().GetIncarnation() == 2 && len(w.launcher.processes()) == 2
	})
	if r := status.GetRun(); r.GetState() != scheduler.Paused || r.GetReason() != refusal.Exploding {
		t.Errorf("after the scheduler was replaced: %v", r)
	}
	w.mesh.read(func() {
		if n := w.mesh.request.GetFence().GetIncarnation(); n != 1 {
			t.Errorf("the controller was started with incarnation %d before the run was resumed", n)
		}
	})

	w.mesh.do(func() { w.mesh.held = false })
	if r := w.resume(run); r.GetState() != scheduler.Starting || r.GetReason() != "" || r.GetMessage() != "" || r.GetIncarnation() != 3 {
		t.Errorf("resumed %v", r)
	}
	w.refuse(run, 1)
	w.waitState(run, scheduler.Succeeded)
	w.whole(4)
}

// A scheduler without ResumeOnStart leaves such a run PAUSED, with its reason and without workers,
// whether the earlier scheduler stopped or died. The run can be shown, resumed, or cancelled.
func TestRefusedGradientOutlivesTheScheduler(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*world){"died": (*world).kill, "stopped": func(w *world) { w.generation.stop() }} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, run := refused(t)
			w.waitState(run, scheduler.Paused)
			end(w)
			w.mesh.do(func() { w.mesh.held = false })
			w.start()
			status := w.waitState(run, scheduler.Paused) // which watches
			if r := status.GetRun(); r.GetReason() != refusal.Exploding || r.GetIncarnation() != 1 || !strings.Contains(status.GetWaitingFor(), "step-000001.npz") {
				t.Errorf("status %v", status)
			}
			if s := w.events.of("run.state", "state"); slices.Contains(s, "INTERRUPTED") {
				t.Errorf("states %v", s)
			}
			if r := w.resume(run); r.GetState() != scheduler.Starting || r.GetReason() != "" || r.GetIncarnation() != 2 {
				t.Errorf("resumed %v", r)
			}
			w.waitState(run, scheduler.Succeeded)
			w.whole(4)
		})
	}
	w, run := refused(t)
	w.kill()
	w.start()
	got, err := w.generation.CancelRun(t.Context(), &runv1.CancelRunRequest{RunId: run, Drain: true})
	if r := got.GetRun(); err != nil || r.GetState() != scheduler.Cancelled || r.GetReason() != "" || r.GetEndTime() == nil {
		t.Errorf("cancelled %v %v", got, err)
	}
}

// The run is paused again if the gradient is refused again.
func TestGradientMayBeRefusedAgain(t *testing.T) {
	t.Parallel()
	w, run := refused(t)
	w.resume(run)
	w.wait(run, func(s *runv1.RunStatus) bool { return s.GetRun().GetState() == scheduler.Running })
	w.refuse(run, 2)
	if r := w.waitState(run, scheduler.Paused).GetRun(); r.GetReason() != refusal.Exploding || r.GetIncarnation() != 2 {
		t.Errorf("paused again: %v", r)
	}
	if s := w.events.of("run.state", "state"); slices.Contains(s, "INTERRUPTED") {
		t.Errorf("states %v", s)
	}
}

func TestCancelAfterARefusedGradient(t *testing.T) {
	t.Parallel()
	for name, drain := range map[string]bool{"drain": true, "at once": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, run := refused(t)
			if _, err := w.generation.CancelRun(t.Context(), &runv1.CancelRunRequest{RunId: run, Drain: drain}); err != nil {
				t.Fatal(err)
			}
			if r := w.waitState(run, scheduler.Cancelled).GetRun(); r.GetReason() != "" || len(w.launcher.processes()) != 0 {
				t.Errorf("record %v, %d workers", r, len(w.launcher.processes()))
			}
		})
	}
}

// A cancel before the refusal of a gradient still ends the run.
func TestRefusedGradientDoesNotKeepARunFromStopping(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	still := w.generation.gate.freeze("StopRun")
	if _, err := w.generation.CancelRun(t.Context(), &runv1.CancelRunRequest{RunId: run, Drain: true}); err != nil {
		t.Fatal(err)
	}
	<-still.reached
	w.refuse(run, 1)
	close(still.thaw)
	if r := w.waitState(run, scheduler.Cancelled).GetRun(); r.GetReason() != "" {
		t.Errorf("record %v", r)
	}
	if s := w.events.of("run.state", "state"); slices.Contains(s, "PAUSED") {
		t.Errorf("states %v", s)
	}
}

// A collapse pauses the run like a refused gradient. The wait says what was found and what the user
// can do.
func TestACollapsePausesUntilResumeRun(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	if _, err := w.generation.internal.CompleteRun(w.t.Context(), &runv1.CompleteRunRequest{
		RunId: run, Fence: fencetest.Controller(1, 1), State: scheduler.Paused, Reason: refusal.RewardCollapse, Message: "step 9: the reward collapsed",
	}); err != nil {
		t.Fatal(err)
	}
	waits := w.waitState(run, scheduler.Paused).GetWaits()
	if len(waits) != 1 || waits[0].GetOwner() != "user" || waits[0].GetReason() != refusal.RewardCollapse || waits[0].GetFix() != "rollout runs resume "+run ||
		!strings.Contains(waits[0].GetEvidence(), "to continue it as it is") || !strings.Contains(waits[0].GetEvidence(), "step 9: the reward collapsed") {
		t.Fatalf("waits for %v", waits)
	}
	if r := w.resume(run); r.GetIncarnation() != 2 || r.GetReason() != "" {
		t.Errorf("resumed as %v", r)
	}
}
