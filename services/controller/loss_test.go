package controller

import (
	"slices"
	"strings"
	"testing"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// finishOnPreferences drives a run on preferences to its end. Its evaluations are losses of
// held-out pairs.
func finishOnPreferences(t *testing.T, w *world) {
	t.Helper()
	s, stop := w.start()
	defer stop()
	wanted := request(t, steps)
	wanted.Plan.Config.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dpo{Dpo: &configv1.DpoConfig{}}}
	if _, err := s.StartRun(t.Context(), wanted); err != nil {
		t.Fatal(err)
	}
	finish(t, s)
	w.fresh = true // nothing is sampled, so nothing waits for the delivery of weights
	correct(t, w)
}

func TestTheLearnerComputesTheLossOfHeldOutRows(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	finishOnPreferences(t, w)
	var evaluations []*eventv1.Event
	for _, e := range w.events {
		if e.GetKind() == "eval.finished" {
			evaluations = append(evaluations, e)
		}
	}
	if len(evaluations) != 3 || evaluations[0].GetStep() != 0 || evaluations[1].GetStep() != 2 || evaluations[2].GetStep() != steps {
		t.Fatalf("got %v", evaluations)
	}
	metrics := evaluations[1].GetMetrics()
	if metrics["eval/loss"] != 0.5 || metrics["eval/rewards/accuracy"] != 0.75 || metrics["eval/samples"] != 8 || metrics["eval/failed"] != 2 {
		t.Errorf("metrics %v", metrics)
	}
	if want := "evaluation at step 2: loss 0.5 over 6 held-out rows; 2 could not be used and are not counted"; evaluations[1].GetMessage() != want {
		t.Errorf("got %q, want %q", evaluations[1].GetMessage(), want)
	}
	if slices.Contains(w.trace, "Evaluate") {
		t.Error("a worker was asked for completions")
	}
}

func TestAnEvaluationIsRepeatedAfterALostLearner(t *testing.T) {
	t.Parallel()
	for lost := 1; lost <= 3; lost++ {
		w := newWorld(t)
		w.fault, w.only = lost, "EvaluateLoss"
		w.onFault = func() {
			w.kill(w.learner.address)
			w.startLearner()
		}
		finishOnPreferences(t, w)
		if got := strings.Count(strings.Join(w.trace, " "), "EvaluateLoss"); got != 4 {
			t.Errorf("evaluation %d failed: %d were started, want 4", lost, got)
		}
	}
}
