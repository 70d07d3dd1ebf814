package controller

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
)

// worsening is the loss of a learner that is best at step 4.
func worsening(step uint64) map[string]float64 {
	return map[string]float64{"loss": 10 + max(4-float64(step), 2*(float64(step)-4))}
}

// restoring is the request of a run of ten steps that restores the state of step 4 after step 7.
// Both steps are also those of snapshots.
func restoring(t *testing.T, w *world, deterministic bool) *learnerv1.StartRunRequest {
	req := guarded(t, w, "no improvement of loss in 3 steps", "restore_best")
	w.learner.metrics = worsening
	req.Plan.Config.Deterministic = &deterministic
	req.Plan.Config.Gates["kept"] = &configv1.GateConfig{When: proto.String("loss > 15"), Action: proto.String("promote")} // at step 7, too
	req.Plan.Config.Snapshot = &configv1.SnapshotConfig{EverySteps: proto.Uint64(1), Best: proto.String("loss")}
	return req
}

// digestAfter is the digest of a learner that makes steps from restored weights.
func digestAfter(digest string, from, to uint64) string {
	for s := from + 1; s <= to; s++ {
		digest = digestOf(digest, digestOf("batch", s))
	}
	return digest
}

// distinct are the events of a kind, by id.
func (w *world) distinct(kind string) map[string]*eventv1.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	found := map[string]*eventv1.Event{}
	for _, e := range w.events {
		if e.GetKind() == kind {
			found[e.GetEventId()] = e
		}
	}
	return found
}

// checkRestored reports how a run of restoring did not end as one that nothing disturbed.
func (w *world) checkRestored(p *learnerv1.Progress) string {
	w.mu.Lock()
	steps, recorded, old := len(w.steps), w.retrained[7], w.oldLineage
	var last, kept, seventh string
	if steps > 0 {
		last = w.steps[steps-1].GetWeightsDigest()
	}
	for _, s := range w.snapshots {
		switch {
		case s.GetStep() == 7 && s.GetName() == "gate-kept":
			kept = s.GetWeightsDigest()
		case s.GetStep() == 7 && s.GetName() == periodic:
			seventh = s.GetWeightsDigest()
		}
	}
	w.mu.Unlock()
	w.inference.mu.Lock()
	served := w.inference.receipt.GetDigest()
	w.inference.mu.Unlock()
	restored := w.distinct("gate.restored")
	switch want := digestAfter(digestAt(4), 7, 10); {
	case p.GetPhase() != finished || p.GetStep() != 10:
		return "ended as " + p.GetPhase().String() + ": " + p.GetMessage()
	case last != want:
		return "step 10 does not continue from step 4"
	case served != want:
		return "the workers have other weights than the learner"
	case recorded != digestAt(4) || old == 0:
		return "the ledger does not record the restored weights as version 7"
	case kept != digestAt(7):
		return "the promoted snapshot is not of the weights that the gate saw: " + kept
	case seventh != digestAt(4):
		return "the snapshot of step 7 is not of the restored state: " + seventh
	case len(restored) != 1:
		return "not one event of the restore"
	}
	for _, e := range restored {
		if e.GetStep() != 7 || e.GetMetrics()["from_step"] != 4 || e.GetAttributes()["digest"] != digestAt(4) || !strings.Contains(e.GetMessage(), "the best was 10 at step 4") {
			return "event " + e.String()
		}
	}
	return ""
}

// A gate restores the best snapshot once, and the run continues with the next step.
func TestAGateRestoresTheBestSnapshot(t *testing.T) {
	t.Parallel()
	for _, deterministic := range []bool{false, true} {
		w := newWorld(t)
		s, stop := w.start()
		if flaw := w.checkRestored(driven(t, s, restoring(t, w, deterministic))); flaw != "" {
			t.Errorf("deterministic %v: %s", deterministic, flaw)
		}
		if w.lineage != 1 {
			t.Errorf("%d lineages", w.lineage)
		}
		stop()
	}
}

// Without a best snapshot, and at the best step itself, the run continues as it is.
func TestAGateWithNothingToRestore(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ when, best, why string }{
		{"loss < 8", "eval/none", "no step has improved eval/none"},
		{"loss < 8", "loss", "the step itself is the best one"},
	} {
		w := newWorld(t)
		s, stop := w.start()
		req := guarded(t, w, c.when, "restore_best")
		req.Plan.Config.Snapshot.Best = &c.best
		p := driven(t, s, req)
		found := w.distinct("gate.not_restored")
		if p.GetPhase() != finished || len(found) != 1 || len(w.distinct("gate.restored")) != 0 || w.steps[9].GetWeightsDigest() != digestAt(10) {
			t.Errorf("%+v: ended as %s, events %v", c, p.GetPhase(), found)
		}
		for _, e := range found {
			if !strings.Contains(e.GetMessage(), c.why) {
				t.Errorf("%+v: %s", c, e.GetMessage())
			}
		}
		stop()
	}
}

// The controller, the learner, or both die at each call around the restore of a run. It ends with
// the same weights every time.
func TestARestoreSurvivesWhateverDies(t *testing.T) {
	t.Parallel()
	for _, deterministic := range []bool{false, true} {
		undisturbed := newWorld(t)
		s, stop := undisturbed.start()
		driven(t, s, restoring(t, undisturbed, deterministic))
		stop()
		from := slices.Index(undisturbed.trace, "GetSnapshot") // of the snapshot to restore
		for _, victim := range []string{"controller", "learner", "both"} {
			for _, after := range []bool{false, true} {
				t.Run(victim, func(t *testing.T) {
					t.Parallel()
					for call := from - 15; call <= from+20; call++ {
						w := newWorld(t)
						req := restoring(t, w, deterministic)
						w.fault, w.after = call, after
						died := make(chan struct{})
						w.onFault = func() {
							if victim != "controller" {
								w.kill(w.learner.address)
								w.startLearner()
								w.learner.metrics = worsening
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
						if flaw := w.checkRestored(p); flaw != "" {
							t.Fatalf("deterministic %v, call %d, %s, after %v: %s", deterministic, call, undisturbed.trace[call-1], after, flaw)
						}
					}
				})
			}
		}
	}
}
