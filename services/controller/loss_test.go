package controller

import (
	"slices"
	"strings"
	"testing"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// taught drives a run on preferences whose held-out pairs nobody answers, to its end.
func taught(t *testing.T, w *world) {
	t.Helper()
	s, stop := w.start()
	defer stop()
	wanted := request(t, steps)
	wanted.Plan.Config.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dpo{Dpo: &configv1.DpoConfig{}}}
	if _, err := s.StartRun(t.Context(), wanted); err != nil {
		t.Fatal(err)
	}
	finish(t, s)
	correct(t, w)
}

func TestTheLearnerComputesTheLossOfHeldOutRows(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	taught(t, w)
	var told []*eventv1.Event
	for _, e := range w.events {
		if e.GetKind() == "eval.finished" {
			told = append(told, e)
		}
	}
	if len(told) != 3 || told[0].GetStep() != 0 || told[1].GetStep() != 2 || told[2].GetStep() != steps {
		t.Fatalf("evaluations %v", told)
	}
	metrics := told[1].GetMetrics()
	if metrics["eval/loss"] != 0.5 || metrics["eval/rewards/accuracy"] != 0.75 || metrics["eval/samples"] != 8 || metrics["eval/failed"] != 2 {
		t.Errorf("metrics %v", metrics)
	}
	if want := "evaluation at step 2: loss 0.5 over 6 held-out rows; 2 could not be used and are not counted"; told[1].GetMessage() != want {
		t.Errorf("got %q, want %q", told[1].GetMessage(), want)
	}
	if slices.Contains(w.trace, "Evaluate") {
		t.Error("a worker was asked for answers")
	}
}

func TestALearnerThatIsLostInAnEvaluationDoesItAgain(t *testing.T) {
	t.Parallel()
	calm := newWorld(t)
	taught(t, calm)
	for call, name := range calm.trace {
		if name != "EvaluateLoss" {
			continue
		}
		w := newWorld(t)
		w.fault = call + 1
		w.onFault = func() {
			w.kill(w.learner.address)
			w.startLearner()
		}
		taught(t, w)
		if got := strings.Count(strings.Join(w.trace, " "), "EvaluateLoss"); got != 4 {
			t.Errorf("call %d failed: %d evaluations were begun, want 4", call+1, got)
		}
	}
}
