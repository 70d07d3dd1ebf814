package controller

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

const steps = 4

// await waits until the progress satisfies is, or fails the test.
func await(t *testing.T, s *Server, what string, is func(p *learnerv1.Progress) bool) *learnerv1.Progress {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	d, err := s.find(ctx, run)
	if err != nil {
		t.Fatal(err)
	}
	for {
		p, changed := d.progress.read()
		if is(p) {
			return p
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("no %s: %v", what, p)
		}
	}
}

func finish(t *testing.T, s *Server) {
	t.Helper()
	p := await(t, s, "end", func(p *learnerv1.Progress) bool { return ended(p.GetPhase()) })
	if p.GetPhase() != finished {
		t.Fatalf("ended as %s: %s", p.GetPhase(), p.GetMessage())
	}
	d, _ := s.find(t.Context(), run)
	<-d.done
}

// correct asserts that each step was committed once, with the digest that an undisturbed run has.
func correct(t *testing.T, w *world) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.steps) != steps || w.initial != digestAt(0) {
		t.Fatalf("%d steps committed, initial weights %s", len(w.steps), w.initial)
	}
	for i, s := range w.steps {
		if s.GetStep() != uint64(i)+1 || s.GetWeightsDigest() != digestAt(s.GetStep()) {
			t.Fatalf("step %d has digest %s", s.GetStep(), s.GetWeightsDigest())
		}
	}
	w.inference.mu.Lock()
	defer w.inference.mu.Unlock()
	if w.inference.paused && !w.fresh {
		t.Fatal("the inference worker is paused at the end")
	}
	if got := w.inference.receipt.GetDigest(); got != digestAt(steps) && !w.fresh {
		t.Fatalf("the inference worker has %s loaded at the end", got)
	}
	if n := len(w.completed); n == 0 || w.completed[n-1].GetState() != runv1.RunState_RUN_STATE_SUCCEEDED {
		t.Fatalf("reported to the scheduler: %v", w.completed)
	}
	if len(w.late) > 0 {
		t.Fatalf("the end was reported to the scheduler before these events were on the bus: %v", w.late)
	}
	if n := len(w.snapshots); n == 0 || w.snapshots[n-1].GetStep() != steps || w.snapshots[n-1].GetCursor().GetPosition() != 2*steps {
		t.Fatalf("newest snapshot %v", w.snapshots)
	}
}

func begin(t *testing.T, w *world) (*Server, func()) {
	t.Helper()
	s, stop := w.start()
	if _, err := s.StartRun(t.Context(), w.request(t)); err != nil {
		t.Fatal(err)
	}
	return s, stop
}

func TestUndisturbed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s, stop := begin(t, w)
	defer stop()
	finish(t, s)
	correct(t, w)
	kinds := map[string]int{}
	for _, e := range w.events {
		kinds[e.GetKind()]++
	}
	if kinds["step.committed"] != steps || kinds["eval.finished"] != 3 || kinds["completions"] != steps || kinds["weights.delivered"] != steps+1 {
		t.Fatalf("events %v", kinds)
	}
}

// TestFaultAtEveryCall fails each call that an undisturbed run makes, before or after it takes
// effect. Together with the call fails: nothing, the learner, the inference worker, both together
// with the folders of the weights, both where workers can't open the learner's folder, or the
// controller.
func TestFaultAtEveryCall(t *testing.T) {
	t.Parallel()
	undisturbed := newWorld(t)
	s, stop := begin(t, undisturbed)
	finish(t, s)
	stop()
	calls := undisturbed.calls
	t.Logf("an undisturbed run of %d steps makes %d calls", steps, calls)
	for _, victim := range []string{"nothing", "learner", "inference", "workers", "workers on other hosts", "controller"} {
		for _, after := range []bool{false, true} {
			t.Run(victim, func(t *testing.T) {
				t.Parallel()
				for call := 1; call <= calls; call++ {
					failAt(t, "", victim, call, after)
				}
			})
		}
	}
}

// A call between the two phases of an update fails, or with it the worker or the controller dies.
func TestFaultAtEveryCallOfAnUpdate(t *testing.T) {
	t.Parallel()
	for _, update := range []policy{updateRolling, updateAtomic} {
		undisturbed := newWorld(t)
		undisturbed.update = string(update)
		s, stop := begin(t, undisturbed)
		finish(t, s)
		stop()
		correct(t, undisturbed)
		phases := []string{"StageWeights", "CommitWeights", "PauseEngine", "ResumeEngine"}
		for at, name := range undisturbed.trace {
			if !slices.Contains(phases, name) {
				continue
			}
			for _, victim := range []string{"nothing", "inference", "controller"} {
				for _, after := range []bool{false, true} {
					t.Run(string(update)+"/"+victim, func(t *testing.T) {
						t.Parallel()
						failAt(t, string(update), victim, at+1, after)
					})
				}
			}
		}
	}
}

func failAt(t *testing.T, update, victim string, call int, after bool) {
	w := newWorld(t)
	w.update = update
	w.fault, w.after, w.apart = call, after, victim == "workers on other hosts"
	died := make(chan struct{})
	w.onFault = func() {
		switch victim {
		case "learner":
			w.kill(w.learner.address)
			w.startLearner()
		case "inference":
			w.kill(w.inference.address)
			w.startInference()
		case "workers":
			w.kill(w.learner.address)
			w.kill(w.inference.address)
			w.learner.forget()
			w.startInference()
			w.startLearner()
		case "workers on other hosts":
			w.kill(w.learner.address)
			w.kill(w.inference.address)
			w.startInference()
			w.startLearner()
		case "controller":
			close(died)
		}
	}
	s, stop := begin(t, w)
	if victim == "controller" {
		d, _ := s.find(t.Context(), run)
		select {
		case <-died:
		case <-d.done:
		}
		stop()
		s, stop = w.start()
		if _, err := s.StartRun(t.Context(), w.request(t)); err != nil {
			t.Fatal(err)
		}
	}
	defer stop()
	finish(t, s)
	w.mu.Lock()
	// A worker that restarts after the last delivery may still be loading.
	w.fresh = (victim == "inference" || strings.HasPrefix(victim, "workers")) && !slices.Contains(w.trace[call:], "Evaluate")
	w.mu.Unlock()
	correct(t, w)
	if t.Failed() {
		t.Logf("%s, call %d (%s), after effect: %v", victim, call, w.trace[call-1], after)
	}
}

func TestReplayThatDivergesFailsTheRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.fault, w.only = 4, "Train" // step 3 is after the newest snapshot, so it is made again
	w.onFault = func() {
		w.kill(w.learner.address)
		w.startLearner()
		w.learner.drift = "x"
	}
	s, stop := begin(t, w)
	defer stop()
	p := await(t, s, "end", func(p *learnerv1.Progress) bool { return ended(p.GetPhase()) })
	d, _ := s.find(t.Context(), run)
	<-d.done
	if p.GetPhase() != failed || len(w.completed) != 1 || w.completed[0].GetReason() != ReasonDiverged {
		t.Fatalf("ended as %s, reported to the scheduler: %v", p.GetPhase(), w.completed)
	}
}

// Retraining gives different weights in a run that does not promise bits, and no process has the
// first ones: the retrained weights begin a lineage, are served, and the run continues.
func TestRetrainedWeightsAreServed(t *testing.T) {
	t.Parallel()
	for _, policy := range []string{"keep", "reissue"} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			s, stop := w.start()
			defer stop()
			w.apart = true
			w.fault, w.only = 4, "Train"
			w.onFault = func() {
				w.kill(w.learner.address)
				w.kill(w.inference.address)
				w.startInference()
				registered(t, s, w.inference.address) // else the delivery finds no worker that lacks the weights
				w.startLearner()
				w.learner.drift = "x"
			}
			req := request(t, steps)
			req.Plan.Config.Deterministic = proto.Bool(false)
			req.Plan.Config.Recovery = &configv1.RecoveryConfig{OldLineage: &policy}
			if _, err := s.StartRun(t.Context(), req); err != nil {
				t.Fatal(err)
			}
			finish(t, s)
			continuesLineage(t, w)
			if want := bufferv1.OldLineage_value["OLD_LINEAGE_"+strings.ToUpper(policy)]; int32(w.oldLineage) != want {
				t.Errorf("the ledger was asked for %s", w.oldLineage)
			}
		})
	}
}

// The same with a worker that survives its learner, and dies later. Both it and its successor get
// the retrained weights.
func TestRetrainedWeightsAreServedByWorkersThatSurvive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.apart = true
	w.fault, w.only = 4, "Train"
	w.onFault = func() {
		w.kill(w.learner.address)
		w.startLearner()
		w.learner.drift = "x"
		w.mu.Lock()
		defer w.mu.Unlock()
		w.starved = sync.OnceFunc(func() { // later, while the drive waits for samples
			w.kill(w.inference.address)
			w.startInference()
			w.mu.Lock()
			w.starved = nil
			w.mu.Unlock()
		})
	}
	s, stop := w.start()
	defer stop()
	req := request(t, steps)
	req.Plan.Config.Deterministic = proto.Bool(false)
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	finish(t, s)
	continuesLineage(t, w)
}

// continuesLineage checks that step 3 was retrained with other bits, and that the steps after it
// and the weights of the workers continue from these.
func continuesLineage(t *testing.T, w *world) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	forks := slices.DeleteFunc(slices.Clone(w.events), func(e *eventv1.Event) bool { return e.GetKind() != "lineage.forked" })
	again := digestOf(digestAt(2), digestOf("batch", uint64(3))+"x")
	if len(forks) != 1 || forks[0].GetStep() != 3 || forks[0].GetAttributes()["lost"] != digestAt(3) || w.retrained[3] != again {
		t.Fatalf("events %v, retrained %v, want %s", forks, w.retrained, again)
	}
	if got := w.steps[3].GetWeightsDigest(); got != digestOf(again, digestOf("batch", uint64(4))+"x") {
		t.Errorf("step 4 made %s", got)
	}
	if n := len(w.completed); n == 0 || w.completed[n-1].GetState() != runv1.RunState_RUN_STATE_SUCCEEDED {
		t.Errorf("reported to the scheduler: %v", w.completed)
	}
	w.inference.mu.Lock()
	defer w.inference.mu.Unlock()
	if got := w.inference.receipt.GetDigest(); got != w.steps[steps-1].GetWeightsDigest() {
		t.Errorf("the inference worker has %s loaded at the end", got)
	}
}

// registered waits until the fleet of the run has a worker at an address.
func registered(t *testing.T, s *Server, address string) {
	d, err := s.find(t.Context(), run)
	if err != nil {
		t.Error(err)
		return
	}
	for {
		d.fleet.mu.Lock()
		changed := d.fleet.changed
		found := slices.ContainsFunc(slices.Collect(maps.Values(d.fleet.workers)), func(w *inferenceWorker) bool { return w.address == address })
		d.fleet.mu.Unlock()
		if found {
			return
		}
		<-changed
	}
}

// A request of the controller that died reaches the learner after its successor has asked for the
// state: the learner makes the next step while the successor does what was due after the last one.
func TestARecoveryDuringAStepOfAnEarlierController(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.fault, w.only, w.after = 1, "SaveState", false // after step 2
	died := make(chan struct{})
	w.onFault = func() { close(died) }
	_, stop := begin(t, w)
	<-died
	stop()
	w.mu.Lock()
	w.fault, w.only, w.calls = 1, "SaveState", 0
	w.onFault = func() {
		w.learner.step++
		w.learner.digest = digestAt(w.learner.step)
	}
	w.mu.Unlock()
	s, stop := begin(t, w)
	defer stop()
	finish(t, s)
	if w.calls < 2 {
		t.Errorf("the state was saved %d times", w.calls)
	}
	w.mu.Lock()
	w.fresh = true
	w.mu.Unlock()
	correct(t, w)
}

// The learner trains while a state is written, and the snapshot is that of the step at which it was
// copied.
func TestStepsAreMadeWhileASnapshotIsWritten(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.learner.writes = make(chan struct{})
	s, stop := begin(t, w)
	defer stop()
	await(t, s, "the step after the one whose state is written", func(p *learnerv1.Progress) bool { return p.GetStep() >= 3 })
	w.mu.Lock()
	if len(w.snapshots) != 0 {
		t.Errorf("%d snapshots exist before a state was written", len(w.snapshots))
	}
	w.mu.Unlock()
	await(t, s, "the wait for the write, before the next state is copied", func(p *learnerv1.Progress) bool {
		return len(p.GetWaits()) == 1 && p.GetWaits()[0].GetReason() == "SNAPSHOTTING" && strings.Contains(p.GetWaits()[0].GetEvidence(), "write its state of step 2")
	})
	close(w.learner.writes)
	finish(t, s)
	correct(t, w)
	if first := w.snapshots[0]; first.GetStep() != 2 || first.GetWeightsDigest() != digestAt(2) {
		t.Errorf("the first snapshot is that of step %d: %v", first.GetStep(), first)
	}
}

// The controller dies while the snapshot of step 2 is written, and step 3 is committed: its
// successor takes one of step 3.
func TestALostSnapshotIsReplacedByOneOfTheNewestStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.learner.writes = make(chan struct{})
	w.fault, w.only = 4, "LeaseBatch"
	leased := make(chan struct{})
	w.onFault = func() {
		w.mu.Lock()
		w.full = map[string]int{"LeaseBatch": 1000} // the buffer gives no batch any more
		w.mu.Unlock()
		close(leased)
	}
	_, stop := begin(t, w)
	<-leased
	stop()
	w.full = nil
	close(w.learner.writes)
	s, stop := begin(t, w)
	defer stop()
	finish(t, s)
	correct(t, w)
	var made []uint64
	for _, snapshot := range w.snapshots {
		made = append(made, snapshot.GetStep())
	}
	if want := []uint64{3, 4}; !slices.Equal(made, want) {
		t.Errorf("snapshots of the steps %v, want %v", made, want)
	}
}

func TestStopWithDrainTakesASnapshot(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s, stop := w.start()
	defer stop()
	if _, err := s.StartRun(t.Context(), request(t, 100_000)); err != nil {
		t.Fatal(err)
	}
	await(t, s, "a step", func(p *learnerv1.Progress) bool { return p.GetStep() >= 3 })
	stopped, err := s.StopRun(t.Context(), &learnerv1.StopRunRequest{RunId: run, Drain: true, Fence: fencetest.Scheduler(1, 1)})
	if err != nil || stopped.GetProgress().GetPhase() != learnerv1.Phase_PHASE_STOPPED {
		t.Fatalf("got %v, %v", stopped, err)
	}
	newest := w.snapshots[len(w.snapshots)-1]
	if int(newest.GetStep()) != len(w.steps) || len(w.completed) != 0 {
		t.Fatalf("stopped after step %d with a snapshot of step %d, reported to the scheduler: %v", len(w.steps), newest.GetStep(), w.completed)
	}
}

func TestOlderIncarnationIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.stored = &Drive{Spec: &learnerv1.StartRunRequest{RunId: run, Fence: fencetest.Scheduler(5, 1)}, Phase: stopped}
	if err := w.leaders.Admit(run, w.stored.Spec.GetFence()); err != nil {
		t.Fatal(err)
	}
	s, stop := w.start()
	defer stop()
	if _, err := s.StartRun(t.Context(), request(t, steps)); err == nil {
		t.Fatal("incarnation 1 was started after 5")
	}
	req := request(t, 100_000)
	req.Fence = fencetest.Scheduler(6, 1)
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	if _, err := s.StopRun(t.Context(), &learnerv1.StopRunRequest{RunId: run, Fence: fencetest.Scheduler(5, 1)}); !errors.Is(err, fence.ErrFenced) {
		t.Errorf("incarnation 5 stopped incarnation 6: %v", err)
	}
	if resp, err := s.GetProgress(t.Context(), &learnerv1.GetProgressRequest{RunId: run}); err != nil || ended(resp.GetProgress().GetPhase()) {
		t.Errorf("after that: %v %v", resp, err)
	}
	if _, err := s.StopRun(t.Context(), &learnerv1.StopRunRequest{RunId: run, Fence: fencetest.Scheduler(6, 1)}); err != nil {
		t.Error(err)
	}
}

func TestWorkerWithOtherWeightsIsFenced(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.inference.corrupt = true
	s, stop := begin(t, w)
	defer stop()
	fenced := func() bool { return slices.Contains(w.kinds(), "worker.fenced") }
	p := await(t, s, "fence the worker", func(p *learnerv1.Progress) bool { return p.GetPhase() == evaluating && fenced() })
	if p.GetStep() != 0 {
		t.Fatalf("evaluated at step %d", p.GetStep())
	}
	w.kill(w.inference.address)
	w.startInference()
	finish(t, s)
}

func (w *world) kinds() (kinds []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.events {
		kinds = append(kinds, e.GetKind())
	}
	return kinds
}

func TestInfrastructureFailuresHaveNoReward(t *testing.T) {
	t.Parallel()
	failed := trajectoryv1.Outcome_OUTCOME_INFRA_FAILED
	got := score([]*inferencev1.EvalSample{{Reward: 1, Metrics: map[string]float64{"accuracy": 1}}, {Reward: 0.5}, {Outcome: failed}})
	want := map[string]float64{"eval/reward": 0.75, "eval/reward_stderr": 0.25, "eval/accuracy": 1, "eval/samples": 3, "eval/failed": 1}
	if !maps.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
}

func TestEvaluationReportsUnscoredSamples(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := &reporter{bus: w, now: time.Now, samples: 16}
	failure := &inferencev1.EvalSample{Completion: "7", Outcome: trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, Reason: "REWARD_RAISED"}
	r.evaluated(3, &weightsv1.WeightsManifest{Version: 3, Digest: digestAt(3)}, []answers{{heldOut, []*inferencev1.EvalSample{{Completion: "8", Reward: 1}, failure}}})
	r.evaluated(4, nil, []answers{{heldOut, []*inferencev1.EvalSample{failure}}})
	first, second := w.events[0], w.events[1]
	if !strings.Contains(first.GetMessage(), "reward 1.000 over 1 held-out prompts; 1 failed") || !strings.Contains(second.GetMessage(), "no held-out prompt was scored") {
		t.Errorf("got %q and %q", first.GetMessage(), second.GetMessage())
	}
	if a := first.GetAttributes(); a["weights_version"] != "3" || a["weights_digest"] != digestAt(3) {
		t.Errorf("measured at %v", a)
	}
	if shown := first.GetAttributes()["samples"]; !strings.Contains(shown, `"reward":null,"failed":"REWARD_RAISED"`) {
		t.Errorf("got %s", shown)
	}
}

// A run that has ended takes no memory: its progress is in the store.
func TestAnEndedRunIsReleased(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s, stop := begin(t, w)
	defer stop()
	finish(t, s)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for held := 1; held > 0; <-tick.C {
		if t.Context().Err() != nil {
			t.Fatal("the drive is kept")
		}
		s.mu.Lock()
		held = len(s.drives)
		s.mu.Unlock()
	}
	got, err := s.GetProgress(t.Context(), &learnerv1.GetProgressRequest{RunId: run})
	if err != nil || got.GetProgress().GetPhase() != finished || got.GetProgress().GetStep() != steps {
		t.Errorf("progress after the end: %v, %v", got, err)
	}
}
