package controller

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	"github.com/rollout-rl/rollout/libs/refusal"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// falling is the loss of a learner that falls by one each step, from 10 at step 1.
func falling(step uint64) map[string]float64 { return map[string]float64{"loss": 11 - float64(step)} }

// guarded is the request of a run of ten steps with one gate. The loss falls below 6 at step 6.
func guarded(t *testing.T, w *world, when, action string) *learnerv1.StartRunRequest {
	w.learner.metrics = falling
	req := request(t, 10)
	req.Plan.Config.Gates = map[string]*configv1.GateConfig{"goal": {When: proto.String(when), Action: proto.String(action)}}
	return req
}

func (w *world) fired() (found []*eventv1.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.events {
		if e.GetKind() == "gate.fired" {
			found = append(found, e)
		}
	}
	return found
}

// saved are the snapshots of the run: step and name.
func (w *world) saved() (list []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.snapshots {
		list = append(list, fmt.Sprintf("%d %s", s.GetStep(), s.GetName()))
	}
	slices.Sort(list)
	return list
}

func TestAGateStopsTheRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := guarded(t, w, "loss < 6", "stop")
	s, stop := w.start()
	defer stop()
	if p := driven(t, s, req); p.GetPhase() != finished || p.GetStep() != 6 {
		t.Fatalf("ended as %s after step %d: %s", p.GetPhase(), p.GetStep(), p.GetMessage())
	}
	if got := w.completed[0]; len(w.completed) != 1 || got.GetState() != runv1.RunState_RUN_STATE_SUCCEEDED || got.GetReason() != refusal.StoppedByGate ||
		got.GetMessage() != "gate goal: `loss < 6` holds at step 6: loss is 5" {
		t.Fatalf("reported to the scheduler: %v", w.completed)
	}
	found := w.fired()
	if len(slices.CompactFunc(found, func(a, b *eventv1.Event) bool { return a.GetEventId() == b.GetEventId() })) != 1 || found[0].GetStep() != 6 ||
		found[0].GetAttributes()["condition"] != "loss < 6" || found[0].GetMetrics()["value"] != 5 {
		t.Errorf("events %v", found)
	}
}

// A gate between two snapshots ends the run with a snapshot of its step, and its weights delivered.
func TestAGateEndsWithTheStateOfItsStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := guarded(t, w, "loss < 7", "stop") // step 5
	req.Plan.Config.Train.DeliverEverySteps = proto.Uint64(4)
	s, stop := w.start()
	defer stop()
	driven(t, s, req)
	if got := w.saved(); !slices.Contains(got, "5 ") {
		t.Errorf("snapshots %v", got)
	}
	w.inference.mu.Lock()
	defer w.inference.mu.Unlock()
	if v := w.inference.receipt.GetVersion(); v != 5 {
		t.Errorf("the worker has version %d", v)
	}
}

func TestAGatePausesTheRunOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := guarded(t, w, "loss < 6", "pause")
	s, stop := w.start()
	defer stop()
	if p := driven(t, s, req); p.GetPhase() != stopped || p.GetStep() != 6 {
		t.Fatalf("ended as %s after step %d: %s", p.GetPhase(), p.GetStep(), p.GetMessage())
	}
	if len(w.completed) != 1 || w.completed[0].GetState() != runv1.RunState_RUN_STATE_PAUSED || w.completed[0].GetReason() != refusal.PausedByGate {
		t.Fatalf("reported to the scheduler: %v", w.completed)
	}
	req = w.resume(req)
	if p := driven(t, s, req); p.GetPhase() != finished || p.GetStep() != 10 {
		t.Fatalf("resumed: ended as %s after step %d: %s", p.GetPhase(), p.GetStep(), p.GetMessage())
	}
}

// resume returns the request of the next incarnation.
func (w *world) resume(req *learnerv1.StartRunRequest) *learnerv1.StartRunRequest {
	req = proto.CloneOf(req)
	req.Fence = fencetest.Scheduler(2, 1)
	w.mu.Lock()
	w.incarnation = "2"
	w.mu.Unlock()
	w.announce()
	return req
}

// The run of a control plane that was killed after a gate had fired, and before the scheduler knew,
// is interrupted. The incarnation that resumes it stops at the same step.
func TestAGateStopsTheNextIncarnation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := guarded(t, w, "loss < 6", "stop")
	s, stop := w.start()
	driven(t, s, req)
	stop()
	w.mu.Lock()
	w.stored.Active, w.stored.Phase = true, committing
	w.stored.Gates = []byte(strings.ReplaceAll(string(w.stored.Gates), `,"ended":true`, ""))
	w.mu.Unlock()
	req = w.resume(req)
	s, stop = w.start()
	defer stop()
	if p := driven(t, s, req); p.GetPhase() != finished || p.GetStep() != 6 || len(w.completed) != 2 {
		t.Fatalf("ended as %s after step %d, reported %v", p.GetPhase(), p.GetStep(), w.completed)
	}
}

// A promotion takes a snapshot of its own, and each best value another one. The loss is best at
// every step, and its snapshots are kept apart from those that are due.
func TestPromotionsAndBestValuesTakeSnapshots(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := guarded(t, w, "loss < 6", "promote")
	req.Plan.Config.Snapshot = &configv1.SnapshotConfig{EverySteps: proto.Uint64(4), Keep: proto.Uint32(1), Best: proto.String("loss"), KeepBest: proto.Uint32(2)}
	w.learner.metrics = func(step uint64) map[string]float64 {
		return map[string]float64{"loss": max(11-float64(step), 3)} // best at step 8
	}
	s, stop := w.start()
	defer stop()
	if p := driven(t, s, req); p.GetPhase() != finished || p.GetStep() != 10 {
		t.Fatalf("ended as %s after step %d: %s", p.GetPhase(), p.GetStep(), p.GetMessage())
	}
	got := slices.DeleteFunc(w.saved(), func(s string) bool { return strings.HasSuffix(s, " best") })
	if want := []string{"10 ", "4 ", "6 gate-goal", "8 "}; !slices.Equal(got, want) { // the world deletes none
		t.Errorf("snapshots %v, want %v", got, want)
	}
	best := slices.DeleteFunc(w.saved(), func(s string) bool { return !strings.HasSuffix(s, " best") })
	if len(best) != 8 || slices.Contains(best, "9 best") {
		t.Errorf("best snapshots %v", best)
	}
	if e := w.fired(); len(e) == 0 || e[0].GetAttributes()["snapshot_name"] != "gate-goal" {
		t.Errorf("events %v", e)
	}
}

// An evaluation fires a gate at its step, also one that a reserved worker makes in the background.
func TestAnEvaluationStopsTheRun(t *testing.T) {
	t.Parallel()
	for _, reserved := range []bool{false, true} {
		w := newWorld(t)
		req := guarded(t, w, "eval/reward >= 1", "stop")
		if reserved {
			req.Plan.Config.Eval.Workers = proto.Uint32(1)
			close(w.startReserved().hold)
		}
		s, stop := w.start()
		p := driven(t, s, req)
		if found := w.fired(); len(found) == 0 || found[0].GetStep() != 2 {
			t.Errorf("reserved %v: events %v", reserved, found)
		}
		if p.GetPhase() != finished || p.GetStep() == 10 || !reserved && p.GetStep() != 2 {
			t.Errorf("reserved %v: ended as %s after step %d: %s", reserved, p.GetPhase(), p.GetStep(), p.GetMessage())
		}
		stop()
	}
}

// The controller, the learner, or both die at each call of a run that a gate ends. The gate fires
// at the same step every time, under one event id, and the run ends there.
func TestAGateFiresAtItsStepWhateverDies(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		when, action string
		step         uint64
	}{{"loss < 6", "stop", 6}, {"no improvement of eval/reward in 2 evaluations", "pause", 4}} {
		undisturbed := newWorld(t)
		s, stop := undisturbed.start()
		driven(t, s, guarded(t, undisturbed, c.when, c.action))
		stop()
		want := undisturbed.fired()[0].GetEventId()
		for _, victim := range []string{"controller", "learner", "both"} {
			for _, after := range []bool{false, true} {
				t.Run(c.action+" "+victim, func(t *testing.T) {
					t.Parallel()
					for call := 1; call <= undisturbed.calls; call++ {
						w := newWorld(t)
						req := guarded(t, w, c.when, c.action)
						w.fault, w.after = call, after
						died := make(chan struct{})
						w.onFault = func() {
							if victim != "controller" {
								w.kill(w.learner.address)
								w.startLearner()
								w.learner.metrics = falling
							}
							close(died)
						}
						s, stop := w.start()
						if _, err := s.StartRun(t.Context(), req); err != nil {
							t.Fatal(err)
						}
						d, _ := s.find(t.Context(), run)
						select {
						case <-died:
						case <-d.done:
						}
						if victim != "learner" {
							stop()
							s, stop = w.start()
						}
						p := driven(t, s, req)
						stop()
						found := w.fired()
						if p.GetStep() != c.step || len(found) == 0 {
							t.Fatalf("call %d, %s, after %v: ended as %s after step %d with %d events: %s", call, undisturbed.trace[call-1], after, p.GetPhase(),
								p.GetStep(), len(found), p.GetMessage())
						}
						for _, e := range found {
							if e.GetEventId() != want || e.GetStep() != c.step {
								t.Fatalf("call %d, %s, after %v: event %v", call, undisturbed.trace[call-1], after, e)
							}
						}
					}
				})
			}
		}
	}
}

// A controller that starts again continues its drives by itself, with what their gates remember.
func TestARestartKeepsTheGates(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := guarded(t, w, "loss < 9", "promote") // step 3
	s, stop := w.start()
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	await(t, s, "step 5", func(p *learnerv1.Progress) bool { return p.GetStep() >= 5 })
	stop()
	s, stop = w.start()
	defer stop()
	for driving := false; !driving; runtime.Gosched() {
		s.mu.Lock()
		driving = len(s.drives) > 0
		s.mu.Unlock()
	}
	finish(t, s)
	for _, e := range w.fired() {
		if e.GetStep() != 3 {
			t.Errorf("the gate fired at step %d", e.GetStep())
		}
	}
}
