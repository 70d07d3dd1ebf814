package controller

import (
	"slices"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/refusal"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// A refused gradient pauses the run and stops the drive. This incarnation never tries the step
// again.
func TestARefusedGradientPausesTheRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.learner.refuses = 3
	s, stop := begin(t, w)
	defer func() { stop() }()
	halted := func(when string) {
		t.Helper()
		p := await(t, s, "end", func(p *learnerv1.Progress) bool { return ended(p.GetPhase()) })
		d, _ := s.find(t.Context(), run)
		<-d.done
		if p.GetPhase() != stopped || p.GetStep() != 2 || w.stored.Active {
			t.Fatalf("%s: ended as %s after step %d, active %v", when, p.GetPhase(), p.GetStep(), w.stored.Active)
		}
	}
	halted("at first")
	if len(w.completed) != 1 {
		t.Fatalf("reported to the scheduler: %v", w.completed)
	}
	report := w.completed[0]
	if report.GetState() != runv1.RunState_RUN_STATE_PAUSED || report.GetReason() != refusal.Exploding || report.GetFence().GetIncarnation() != 1 ||
		!strings.Contains(report.GetMessage(), "kept in step.npz") {
		t.Errorf("reported to the scheduler: %v", report)
	}
	tries := func() (n int) {
		for _, call := range w.trace {
			if call == "Train" {
				n++
			}
		}
		return n
	}
	before := tries()
	req := w.stored.Spec
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	stop()
	s, stop = w.start()
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	halted("after a restart")
	if tries() != before {
		t.Errorf("the step was tried again: %s", slices.Compact(w.trace))
	}
}
