package controller

import (
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

// exploding is the request of a supervised run of ten steps, with a learner whose loss explodes
// from step 4 on. The check needs two steps, so it finds the collapse at step 5. Snapshots are due
// every two steps.
func exploding(t *testing.T, w *world, action string) *learnerv1.StartRunRequest {
	w.learner.metrics = func(step uint64) map[string]float64 {
		if step >= 4 {
			return map[string]float64{"loss": 50, "learning_rate": 1}
		}
		return map[string]float64{"loss": 1}
	}
	req := request(t, 10)
	req.Plan.Config.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Sft{Sft: &configv1.SftConfig{}}}
	req.Plan.Config.Health.OnCollapse = proto.String(action)
	return req
}

func collapses(w *world) (found []*eventv1.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.events {
		if e.GetKind() == "health.collapse" {
			found = append(found, e)
		}
	}
	return found
}

func driven(t *testing.T, s *Server, req *learnerv1.StartRunRequest) *learnerv1.Progress {
	t.Helper()
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	p := await(t, s, "end", func(p *learnerv1.Progress) bool { return ended(p.GetPhase()) })
	d, _ := s.find(t.Context(), run)
	<-d.done
	return p
}

func TestACollapseIsAWarning(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := exploding(t, w, "warn")
	s, stop := w.start()
	defer stop()
	if p := driven(t, s, req); p.GetPhase() != finished || p.GetStep() != 10 {
		t.Fatalf("ended as %s after step %d: %s", p.GetPhase(), p.GetStep(), p.GetMessage())
	}
	found := collapses(w)
	if len(found) != 1 || found[0].GetStep() != 5 || found[0].GetLevel() != eventv1.Level_LEVEL_WARN ||
		found[0].GetAttributes()["reason"] != refusal.LossExplosion || found[0].GetAttributes()["snapshot"] != "snap-2" ||
		!strings.Contains(found[0].GetMessage(), "the learning rate is too high (1 at this step)") {
		t.Fatalf("events %v", found)
	}
	if len(w.pinned) > 0 {
		t.Errorf("pinned %v", w.pinned)
	}
}

// The run is paused, the snapshot from before the collapse stays, and a restart changes nothing. A
// resumed run continues: the collapse is known.
func TestACollapsePausesTheRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := exploding(t, w, "pause")
	s, stop := w.start()
	defer func() { stop() }()
	halted := func(when string, req *learnerv1.StartRunRequest) {
		t.Helper()
		if p := driven(t, s, req); p.GetPhase() != stopped || p.GetStep() != 5 || w.stored.Active {
			t.Fatalf("%s: ended as %s after step %d, active %v", when, p.GetPhase(), p.GetStep(), w.stored.Active)
		}
	}
	halted("at first", req)
	if len(w.completed) != 1 || w.completed[0].GetState() != runv1.RunState_RUN_STATE_PAUSED || w.completed[0].GetReason() != refusal.LossExplosion {
		t.Fatalf("reported to the scheduler: %v", w.completed)
	}
	if !strings.Contains(w.completed[0].GetMessage(), "snap-2, of step 2") || !slices.Equal(slices.Compact(w.pinned), []string{"snap-2"}) {
		t.Errorf("pinned %v, and reported %q", w.pinned, w.completed[0].GetMessage())
	}
	stop()
	w.mu.Lock()
	w.stored.Active, w.stored.Phase = true, committing // the controller died before its report arrived
	w.mu.Unlock()
	s, stop = w.start()
	halted("after a restart", req)
	if len(w.completed) != 2 || w.completed[1].GetMessage() != w.completed[0].GetMessage() {
		t.Fatalf("reported after a restart: %v", w.completed)
	}
	resumed := proto.CloneOf(req)
	resumed.Fence = fencetest.Scheduler(2, 1)
	w.mu.Lock()
	w.incarnation = "2"
	w.mu.Unlock()
	w.announce()
	if p := driven(t, s, resumed); p.GetPhase() != finished {
		t.Fatalf("resumed: ended as %s after step %d: %s", p.GetPhase(), p.GetStep(), p.GetMessage())
	}
	if found := collapses(w); len(found) != 1 {
		t.Errorf("%d findings: %v", len(found), found)
	}
}

func TestACollapseStopsTheRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := exploding(t, w, "stop")
	s, stop := w.start()
	defer stop()
	if p := driven(t, s, req); p.GetPhase() != failed || p.GetStep() != 5 || !strings.Contains(p.GetMessage(), "the loss exploded") {
		t.Fatalf("ended as %s after step %d: %s", p.GetPhase(), p.GetStep(), p.GetMessage())
	}
	if len(w.completed) != 1 || w.completed[0].GetState() != runv1.RunState_RUN_STATE_FAILED || w.completed[0].GetReason() != refusal.LossExplosion {
		t.Fatalf("reported to the scheduler: %v", w.completed)
	}
}

// The controller, the learner, or both die at each call of a run that collapses. The collapse is
// found at the same step every time, and reported under one id.
func TestACollapseIsFoundWhateverDies(t *testing.T) {
	t.Parallel()
	undisturbed := newWorld(t)
	req := exploding(t, undisturbed, "pause")
	s, stop := undisturbed.start()
	driven(t, s, req)
	stop()
	want := collapses(undisturbed)[0].GetEventId()
	for _, victim := range []string{"controller", "learner", "both"} {
		for _, after := range []bool{false, true} {
			t.Run(victim, func(t *testing.T) {
				t.Parallel()
				for call := 1; call <= undisturbed.calls; call++ {
					w := newWorld(t)
					req := exploding(t, w, "pause")
					metrics := w.learner.metrics
					w.fault, w.after = call, after
					died := make(chan struct{})
					w.onFault = func() {
						if victim != "controller" {
							w.kill(w.learner.address)
							w.startLearner()
							w.learner.metrics = metrics
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
					found := collapses(w)
					if p.GetPhase() != stopped || p.GetStep() != 5 || len(found) == 0 {
						t.Fatalf("call %d, %s, after %v: ended as %s after step %d with %d findings: %s", call, undisturbed.trace[call-1], after, p.GetPhase(), p.GetStep(),
							len(found), p.GetMessage())
					}
					for _, e := range found {
						if e.GetEventId() != want || e.GetStep() != 5 {
							t.Fatalf("call %d, %s, after %v: finding %v", call, undisturbed.trace[call-1], after, e)
						}
					}
				}
			})
		}
	}
}
