package controller

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
)

// evaluations returns the events of evaluations.
func (w *world) evaluations() (all []*eventv1.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.events {
		if strings.HasPrefix(e.GetKind(), "eval.") {
			all = append(all, e)
		}
	}
	return all
}

// Reserved workers evaluate a version while the run makes the next steps. The next evaluation waits
// for the last one, and the run for the last one of all.
func TestReservedWorkersEvaluateInTheBackground(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	kept := w.startReserved()
	s, stop := w.start()
	defer stop()
	req := w.request(t)
	req.Plan.Config.Eval.Workers = proto.Uint32(1)
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	await(t, s, "evaluation that is waited for", func(p *learnerv1.Progress) bool {
		return p.GetStep() == 4 && len(p.GetWaits()) == 1 && p.GetWaits()[0].GetEvidence() == "the reserved workers to end the evaluation of step 2" && p.GetWaits()[0].GetReason() == "EVALUATING"
	})
	kept.mu.Lock()
	if v := kept.receipt.GetVersion(); v != 2 {
		t.Errorf("the worker serves version %d while it evaluates version 2", v)
	}
	kept.mu.Unlock()
	if got := w.evaluations(); len(got) != 1 || got[0].GetAttributes()["weights_version"] != "0" {
		t.Errorf("evaluations so far: %v", got)
	}
	close(kept.hold)
	finish(t, s)
	correct(t, w)
	var versions []string
	for _, e := range w.evaluations() {
		versions = append(versions, e.GetKind()+" "+e.GetAttributes()["weights_version"]+" "+e.GetAttributes()["weights_digest"])
	}
	if want := []string{"eval.finished 0 " + digestAt(0), "eval.finished 2 " + digestAt(2), "eval.finished 4 " + digestAt(4)}; !slices.Equal(versions, want) {
		t.Errorf("evaluations %q, want %q", versions, want)
	}
	w.inference.mu.Lock()
	defer w.inference.mu.Unlock()
	if len(w.inference.evals) > 0 {
		t.Errorf("the worker that samples evaluated the versions %v", w.inference.evals)
	}
}

// A reserved worker dies while it evaluates: its successor loads the version and evaluates it.
func TestAReservedWorkerThatDiesIsReplaced(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first := w.startReserved()
	s, stop := w.start()
	defer stop()
	req := w.request(t)
	req.Plan.Config.Eval.Workers = proto.Uint32(1)
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	await(t, s, "step 3", func(p *learnerv1.Progress) bool { return p.GetStep() >= 3 })
	w.kill(first.address)
	close(w.startReserved().hold)
	finish(t, s)
	correct(t, w)
	if got := w.evaluations(); len(got) != 3 || got[1].GetStep() != 2 || got[1].GetKind() != "eval.finished" {
		t.Errorf("evaluations: %v", got)
	}
}

// A run that is stopped does not wait for an evaluation, unless it drains.
func TestAStopCancelsTheEvaluation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.startReserved()
	s, stop := w.start()
	defer stop()
	req := w.request(t)
	req.Plan.Config.Eval.Workers = proto.Uint32(1)
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	await(t, s, "step 3", func(p *learnerv1.Progress) bool { return p.GetStep() >= 3 })
	if _, err := s.StopRun(t.Context(), &learnerv1.StopRunRequest{RunId: run, Fence: fencetest.Scheduler(1, 1)}); err != nil {
		t.Fatal(err)
	}
	if got := w.evaluations(); len(got) != 1 {
		t.Errorf("evaluations: %v", got)
	}
}

// A controller that starts again repeats the evaluation that was interrupted, with the version that
// the reserved worker still has, and its gate fires at that step.
func TestARestartRepeatsTheEvaluation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	kept := w.startReserved()
	req := guarded(t, w, "eval/reward >= 1", "stop")
	req.Plan.Config.Eval.Workers = proto.Uint32(1)
	s, stop := w.start()
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	await(t, s, "step 3", func(p *learnerv1.Progress) bool { return p.GetStep() >= 3 })
	stop()
	if len(w.stored.Evaluation) == 0 || len(w.evaluations()) != 1 {
		t.Fatalf("stored %q, evaluations %v", w.stored.Evaluation, w.evaluations())
	}
	s, stop = w.start()
	defer stop()
	close(kept.hold)
	p := driven(t, s, req)
	fired := w.fired()
	if len(fired) != 1 || fired[0].GetStep() != 2 || p.GetStep() > 4 || len(w.stored.Evaluation) != 0 {
		t.Errorf("ended after step %d, the gate fired: %v, stored %q", p.GetStep(), fired, w.stored.Evaluation)
	}
	var steps []string
	for _, e := range w.evaluations() {
		steps = append(steps, e.GetKind()+" "+e.GetAttributes()["weights_version"])
	}
	if want := []string{"eval.finished 0", "eval.finished 2"}; len(steps) < 2 || !slices.Equal(steps[:2], want) { // the run may have reached step 4
		t.Errorf("evaluations %q, want %q first", steps, want)
	}
}

// The learner may have trained a step past the evaluated one that is not committed when the
// controller ends, which no longer has the weights of the evaluation.
func TestARestartBetweenTrainingAndCommitRepeatsTheEvaluation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	kept := w.startReserved()
	req := guarded(t, w, "eval/reward >= 1", "stop")
	req.Plan.Config.Eval.Workers = proto.Uint32(1)
	w.refuse = 3
	s, stop := w.start()
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	await(t, s, "commit of step 3", func(p *learnerv1.Progress) bool {
		return p.GetStep() == 2 && p.GetPhase() == learnerv1.Phase_PHASE_COMMITTING
	})
	stop()
	w.mu.Lock()
	w.refuse = 0
	w.mu.Unlock()
	s, stop = w.start()
	defer stop()
	close(kept.hold)
	p := driven(t, s, req)
	if fired := w.fired(); len(fired) != 1 || fired[0].GetStep() != 2 {
		t.Errorf("ended after step %d, the gate fired: %v", p.GetStep(), fired)
	}
}

// A record of an evaluation that can't be read is ignored, and the run continues.
func TestARestartIgnoresADamagedEvaluation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	kept := w.startReserved()
	req := guarded(t, w, "eval/reward >= 9", "stop")
	req.Plan.Config.Eval.Workers = proto.Uint32(1)
	s, stop := w.start()
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	await(t, s, "step 3", func(p *learnerv1.Progress) bool { return p.GetStep() >= 3 })
	stop()
	w.stored.Evaluation = []byte("damaged")
	s, stop = w.start()
	defer stop()
	close(kept.hold)
	driven(t, s, req)
	if got := w.evaluations(); len(got) != 5 || got[1].GetStep() != 4 {
		t.Errorf("evaluations: %v", got)
	}
}

// A snapshot waits for the evaluation of an earlier step: a run that continues from it could not
// make those weights again.
func TestASnapshotWaitsForTheEvaluation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	kept := w.startReserved()
	s, stop := w.start()
	defer stop()
	req := w.request(t)
	req.Plan.Config.Eval.Workers = proto.Uint32(1)
	req.Plan.Config.Snapshot.EverySteps = proto.Uint64(3)
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	await(t, s, "evaluation that is waited for", func(p *learnerv1.Progress) bool {
		return p.GetStep() == 3 && len(p.GetWaits()) == 1 && p.GetWaits()[0].GetEvidence() == "the reserved workers to end the evaluation of step 2"
	})
	if got := w.saved(); len(got) != 0 {
		t.Errorf("snapshots: %v", got)
	}
	close(kept.hold)
	finish(t, s)
	if got := w.saved(); len(got) == 0 || got[0] != "3 " {
		t.Errorf("snapshots: %v", got)
	}
}
