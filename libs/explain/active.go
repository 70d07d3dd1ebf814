package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// Reasons of the scheduler and the controller that decide which link of the chain a wait is.
const (
	leasing   = "LEASING"
	noAnswer  = "NO_ANSWER"
	queueFull = "QUEUE_FULL"
)

// ends is the fix of waits that end without one.
const ends = "it ends by itself; see the output of a worker with `rollout logs worker RUN WORKER`"

// obvious is how long something may take before it counts as the cause of a wait, where another
// cause is known.
const obvious = 10 * time.Second

// active explains a run that has not ended.
func (e *explainer) active() {
	waits := e.Status.GetWaits()
	phase := first(waits, func(w *waitv1.Wait) bool { return w.GetReason() == e.Status.GetPhase() })
	root := first(waits, func(w *waitv1.Wait) bool {
		return w != phase && (w.GetOwner() == "user" || w.GetReason() == noAnswer || w.GetReason() == queueFull && phase.GetReason() == leasing)
	})
	switch {
	case root != nil:
		e.toRoot(phase, root)
	case phase.GetReason() == leasing:
		e.groups(phase)
	case phase != nil:
		e.busy(phase)
	case len(waits) > 0:
		e.workers(waits[0])
	default:
		e.nothing()
	}
	for _, w := range waits {
		if !e.used[w] {
			e.others = append(e.others, w)
		}
	}
}

func first(waits []*waitv1.Wait, is func(*waitv1.Wait) bool) *waitv1.Wait {
	if i := slices.IndexFunc(waits, is); i >= 0 {
		return waits[i]
	}
	return nil
}

// head adds what the run waits for, in the words of the scheduler.
func (e *explainer) head(w *waitv1.Wait) {
	e.used[w] = true
	e.because(w.GetOwner(), w.GetReason(), w.GetSince(), "the run waits for "+w.GetEvidence(), w.GetFix())
}

// toRoot explains a run that waits for a person or for a service that does not answer.
func (e *explainer) toRoot(phase, root *waitv1.Wait) {
	if phase != nil {
		e.head(phase)
	}
	e.head(root)
	if root.GetReason() != noAnswer {
		return
	}
	last := e.chain[len(e.chain)-1]
	last.Fix = cmp.Or(last.GetFix(), "check with `rollout status` and `rollout doctor` that it runs and can be reached")
	for _, u := range e.Unanswered {
		if strings.Contains(root.GetEvidence(), u.GetName()) {
			last.Evidence += "; it does not answer this command either: " + u.GetError()
		}
	}
}

// nothing explains a run without a wait.
func (e *explainer) nothing() {
	phase := cmp.Or(e.Status.GetPhase(), state(e.run.GetState()))
	e.because("rollout", "NOTHING", e.Status.GetWaitingSince(), "the run waits for nothing: it is "+phase+" at step "+steps(e.run), "")
}

// busy explains a phase in which named workers do something.
func (e *explainer) busy(phase *waitv1.Wait) {
	e.head(phase)
	last := e.chain[len(e.chain)-1]
	last.Fix = cmp.Or(last.GetFix(), strings.ReplaceAll(ends, "RUN WORKER", e.run.GetRunId()+" WORKER"))
	for _, w := range e.Status.GetWorkers() {
		if !strings.Contains(phase.GetEvidence(), w.GetWorkerId()) {
			continue
		}
		if cause := e.hindrance(w); cause != nil {
			e.add(cause)
			return
		}
	}
	if absent := first(e.Status.GetWaits(), absent); absent != nil {
		e.workers(absent)
	}
}

// workers explains that workers do not serve.
func (e *explainer) workers(w *waitv1.Wait) {
	e.head(w)
	if !absent(w) {
		return
	}
	last := e.chain[len(e.chain)-1]
	last.Fix = cmp.Or(last.GetFix(), ends)
	last.Fix = strings.ReplaceAll(last.GetFix(), "RUN WORKER", e.run.GetRunId()+" WORKER")
	for _, worker := range e.Status.GetWorkers() {
		if worker.GetHealthy() || !strings.Contains(w.GetEvidence(), worker.GetWorkerId()) {
			continue
		}
		if cause := e.hindrance(worker); cause != nil {
			e.add(cause)
			return
		}
		if worker.GetRestarts() > 0 {
			last.Evidence += fmt.Sprintf(" (%s so far)", count(int(worker.GetRestarts()), "restart"))
		}
		if lines := e.Logs[worker.GetWorkerId()]; len(lines) > 0 {
			e.because(worker.GetWorkerId(), "WORKER_OUTPUT", nil, "the last lines of "+worker.GetWorkerId()+":\n"+strings.Join(lines, "\n"), "")
			return
		}
	}
}

func absent(w *waitv1.Wait) bool {
	switch w.GetReason() {
	case "WORKER_LOADING", "WORKER_UNREGISTERED", "WORKER_STARTING", "WORKER_RESTARTING":
		return true
	}
	return false
}

// hindrances are the reasons of Worker.waits, the gravest first.
var hindrances = []string{"WORKER_STOPPED", "WORKER_IN_IO", "WORKER_SILENT", "ENGINE_PAUSED"}

// hindrance is why a worker does nothing; nil if it works.
func (e *explainer) hindrance(w *runv1.Worker) *waitv1.Wait {
	if len(w.GetWaits()) == 0 {
		return nil
	}
	rank := func(w *waitv1.Wait) int { return slices.Index(hindrances, w.GetReason()) }
	return slices.MinFunc(w.GetWaits(), func(a, b *waitv1.Wait) int { return cmp.Compare(rank(a), rank(b)) })
}

// groups explains that the learner waits for the batch of its next step.
func (e *explainer) groups(phase *waitv1.Wait) {
	step := e.run.GetStep() + 1
	e.used[phase] = true
	e.because("learner", leasing, phase.GetSince(), fmt.Sprintf("the learner waits for the batch of step %d", step), "")
	e.because("buffer", "GROUPS_MISSING", phase.GetSince(), "the buffer lacks "+phase.GetEvidence()+e.missing(), phase.GetFix())
	switch {
	case phase.GetOwner() == "agents":
		return // the fix of the phase is for them
	case strings.Contains(phase.GetEvidence(), "is stopped (scheduler)"), strings.Contains(phase.GetEvidence(), "(learner-controller)") && !strings.Contains(phase.GetEvidence(), "workers)"):
		return
	}
	for _, g := range e.Missing {
		if g.GetState() == bufferv1.GroupState_GROUP_STATE_DISSOLVED && !strings.Contains(phase.GetEvidence(), "workers)") {
			e.because("scheduler", "NEXT_ATTEMPT", phase.GetSince(), fmt.Sprintf("attempt %d of prompt %d failed: %s; the scheduler issues the next attempt", g.GetKey().GetAttempt(), g.GetPosition(), g.GetReason()),
				"see why with `rollout logs tail "+e.run.GetRunId()+" --level warn`")
			return
		}
	}
	e.sampling()
}

// missing names the groups that have not arrived.
func (e *explainer) missing() string {
	var positions []uint64
	for _, g := range e.Missing {
		if g.GetState() == bufferv1.GroupState_GROUP_STATE_OPEN {
			positions = append(positions, g.GetPosition())
		}
	}
	if len(positions) == 0 {
		return ""
	}
	return "; incomplete: " + prompts(positions, len(positions))
}

// held is an activity of a worker.
type held struct {
	worker   *runv1.Worker
	activity *waitv1.Activity
}

// sampling explains where the missing groups are.
func (e *explainer) sampling() {
	var all []held
	var idle, hindered []*runv1.Worker
	for _, w := range e.Status.GetWorkers() {
		if w.GetKind() != "inference" || w.GetReserved() || !w.GetHealthy() {
			continue
		}
		switch {
		case e.hindrance(w) != nil:
			hindered = append(hindered, w)
		case len(w.GetInFlight()) == 0:
			idle = append(idle, w)
		}
		for _, a := range w.GetInFlight() {
			all = append(all, held{w, a})
		}
	}
	gone := first(e.Status.GetWaits(), func(w *waitv1.Wait) bool { return absent(w) && strings.Contains(w.GetEvidence(), "inference-") })
	slowest := e.slowest(all)
	switch {
	case len(hindered) > 0 && (slowest == nil || e.took(slowest.activity) < obvious || e.hindrance(hindered[0]).GetReason() != "ENGINE_PAUSED"):
		e.add(e.hindrance(hindered[0]))
	case slowest != nil && (gone == nil || e.took(slowest.activity) >= obvious):
		e.doing(slowest)
	case gone != nil:
		e.workers(gone)
	case len(idle) > 0:
		e.lost(idle)
	}
}

// took is how long the first group of an activity has been in it.
func (e *explainer) took(a *waitv1.Activity) time.Duration { return e.Time.Sub(a.GetSince().AsTime()) }

// class is 0 for a group that waits for the other groups of its worker.
func class(h held) int {
	if h.activity.GetDoing() == "SLOT" {
		return 0
	}
	return 1
}

// slowest is the activity that explains the wait best: the longest one that does not wait for the
// others.
func (e *explainer) slowest(all []held) *held {
	if len(all) == 0 {
		return nil
	}
	worst := slices.MaxFunc(all, func(a, b held) int {
		return cmp.Or(cmp.Compare(class(a), class(b)), cmp.Compare(e.took(a.activity), e.took(b.activity)))
	})
	return &worst
}

// doing explains what a worker does with the missing groups.
func (e *explainer) doing(h *held) {
	id, a := h.worker.GetWorkerId(), h.activity
	are := "are"
	if a.GetGroups() == 1 {
		are = "is"
	}
	e.because(id, "SAMPLING", a.GetSince(), fmt.Sprintf("%s %s with %s", prompts(a.GetPositions(), int(a.GetGroups())), are, id), "")
	taken := Elapsed(e.took(a))
	if limit := a.GetLimitSeconds(); limit > 0 {
		taken += " of " + Elapsed(time.Duration(limit*float64(time.Second)))
	}
	logs := "`rollout logs worker " + e.run.GetRunId() + " " + id + "`"
	switch a.GetDoing() {
	case "REWARD":
		e.because(cmp.Or(a.GetName(), "reward"), "REWARD_CALL", a.GetSince(), "the reward call to "+cmp.Or(a.GetName(), "the reward")+" has taken "+taken,
			"see why it is slow: "+logs+", or `rollout plugin test` runs it alone; after the limit (reward.timeout_seconds) the call is ended and repeated")
	case "TOOL_CALL":
		e.because(a.GetName(), "TOOL_CALL", a.GetSince(), "the call of the tool "+a.GetName()+" has taken "+taken,
			"see why it is slow: "+logs+"; after the limit (environment.tool_timeout_seconds) the call is ended, and the policy reads an error")
	case "ENVIRONMENT":
		e.because(cmp.Or(a.GetName(), "environment"), "ENVIRONMENT_STEP", a.GetSince(), "the environment "+cmp.Or(a.GetName(), "of the run")+" has computed a step for "+taken,
			"see why it is slow: "+logs+"; after the limit (environment.turn_timeout_seconds) the samples fail and are retried")
	case "GENERATE":
		fix := "it ends by itself; fewer `sampling.max_tokens`, or more inference workers (engine.workers), make it shorter"
		if h.worker.GetTokensPerSecond() == 0 && e.took(a) > obvious {
			fix = "see why the engine makes no token: " + logs + "; if it hangs, kill the worker: it is restarted, and its groups move to another one"
		}
		e.because(id, "GENERATE", a.GetSince(), "the engine has generated for "+taken+speed(h.worker), fix)
	case "PUBLISH":
		e.because("nats", "PUBLISH", a.GetSince(), "the samples are finished, and NATS or the storage service has not accepted them for "+taken,
			"check that NATS and storage run and have space: `rollout status`, `rollout doctor`")
	case "WEIGHTS":
		e.because("learner-controller", "WEIGHTS", a.GetSince(), fmt.Sprintf("%s has weights version %d and waits for newer ones, for %s", id, h.worker.GetWeightsVersion(), taken),
			"see why they are not delivered: `rollout logs tail "+e.run.GetRunId()+" --kind weights.left_out,weights.delivered`")
	case "SLOT":
		e.because(id, "SLOT", a.GetSince(), "the groups wait for a free slot of the engine, for "+taken, "more slots (engine.slots) or more inference workers (engine.workers) make it shorter")
	default:
		e.because("buffer", a.GetDoing(), a.GetSince(), id+" asks the buffer which samples it has, for "+taken, "check that the buffer runs: `rollout status`")
	}
}

func speed(w *runv1.Worker) string {
	if w.GetTokensPerSecond() == 0 {
		return ", and made no token in the last seconds"
	}
	return fmt.Sprintf(", at %.0f tokens a second", w.GetTokensPerSecond())
}

// lost explains that no worker has the missing groups.
func (e *explainer) lost(idle []*runv1.Worker) {
	ids := make([]string, len(idle))
	for i, w := range idle {
		ids[i] = w.GetWorkerId()
	}
	if len(ids) > mostNamed {
		ids = append(ids[:mostNamed], fmt.Sprintf("%d more", len(idle)-mostNamed))
	}
	q := e.Status.GetQueues()
	if q.GetInFlight() == 0 {
		e.because("scheduler", "NOT_ISSUED", nil, "no group is in flight: the scheduler has issued no prompt after position "+fmt.Sprint(e.Status.GetCursor().GetPosition()),
			"see its log for errors of publishing; `rollout runs resume "+e.run.GetRunId()+"` continues a paused run")
		return
	}
	e.because("nats", "NOT_WITH_WORKERS", nil, fmt.Sprintf("%s issued, and no worker has them: %s wait for work. They are on the work stream of NATS, or were lost there", count(int(q.GetInFlight()), "group"), strings.Join(ids, ", ")),
		"the scheduler issues lost groups again; if this lasts, check NATS with `rollout doctor`")
}
