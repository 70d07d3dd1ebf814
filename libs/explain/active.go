package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/wait"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// leasing is the phase in which the learner waits for the batch of its next step.
const leasing = "LEASING"

// training is the phase in which the learner has the batch.
const training = "TRAINING"

// obvious is how long something may take before it counts as the cause of a wait, where another
// cause is known.
const obvious = 10 * time.Second

// ofBuffer: why a batch is not ready, the gravest first.
var ofBuffer = []string{wait.LedgerClosed, wait.GroupsMissing, wait.NextAttempt, wait.WeightsNotRecorded}

// ofWorkers: that workers do not serve.
var ofWorkers = []string{wait.WorkerLoading, wait.WorkerUnregistered, wait.WorkerStarting, wait.WorkerRestarting}

// ofGateway: what requests and agents wait for; the first explain the later ones.
var ofGateway = []string{wait.WorkersMissing, wait.WorkersFailed, wait.Weights, wait.Slot, wait.NotWithWorkers, wait.SessionsOpen, wait.NoAgent}

// hindrances are the reasons why a worker does nothing, the gravest first.
var hindrances = []string{"DISK_FULL", wait.WorkerStopped, wait.WorkerThrottled, wait.WorkerInIO, wait.WorkerSilent, wait.EnginePaused, "ENGINE_DRAINS", wait.WeightsRefused, "PUBLISH_REFUSED"}

func is(reasons ...string) func(*waitv1.Wait) bool {
	return func(w *waitv1.Wait) bool { return slices.Contains(reasons, w.GetReason()) }
}

// active explains a run that has not ended.
func (e *explainer) active() {
	waits := e.Status.GetWaits()
	phase := first(waits, func(w *waitv1.Wait) bool { return w.GetReason() == e.Status.GetPhase() })
	lacks := gravest(waits, ofBuffer)
	root := first(waits, func(w *waitv1.Wait) bool {
		return w != phase && (w.GetOwner() == wait.User || w.GetReason() == wait.NoAnswer || w.GetReason() == wait.QueueFull && lacks != nil)
	})
	switch {
	case root != nil:
		e.toRoot(cmp.Or(phase, lacks), root)
	case lacks != nil:
		e.groups(lacks)
	case phase != nil:
		e.busy(phase)
	case first(waits, is(ofWorkers...)) != nil:
		e.workers(first(waits, is(ofWorkers...)))
	case first(waits, is(ofGateway...)) != nil:
		e.agents()
	case len(waits) > 0:
		e.head(waits[0])
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

// gravest is the wait with the first of these reasons that any of them has.
func gravest(waits []*waitv1.Wait, reasons []string) *waitv1.Wait {
	for _, reason := range reasons {
		if found := first(waits, is(reason)); found != nil {
			return found
		}
	}
	return nil
}

// head adds what the run waits for.
func (e *explainer) head(w *waitv1.Wait) *waitv1.Wait {
	e.used[w] = true
	return e.because(w.GetOwner(), w.GetReason(), w.GetSince(), "the run waits for "+w.GetEvidence(), w.GetFix())
}

// toRoot explains a run that waits for a person or for a service that does not answer.
func (e *explainer) toRoot(phase, root *waitv1.Wait) {
	if phase != nil {
		e.head(phase)
	}
	last := e.head(root)
	if root.GetReason() != wait.NoAnswer {
		return
	}
	last.Fix = cmp.Or(last.GetFix(), "check with `rollout status` and `rollout doctor` that it runs and can be reached")
	if silent := e.silent(root.GetSubjects()...); silent != nil {
		if e.Processes[silent.GetName()].PID != 0 {
			e.away(silent, root.GetSince())
			return
		}
		last.Owner = silent.GetName()
		last.Evidence += "; " + silent.GetName() + " does not answer this command either: " + silent.GetError()
	}
}

// needs lists the services that each service calls to do its part of a step.
var needs = map[string][]string{
	names.SnapshotService:   {names.StorageService, names.ControllerService, names.BufferService},
	names.ControllerService: {names.BufferService, names.SnapshotService, names.StorageService},
}

// silent is the service that did not answer: one of these, or one that they need; nil if all did.
func (e *explainer) silent(services ...string) *waitv1.Unanswered {
	queue := slices.Clone(services)
	for i := 0; i < len(queue); i++ {
		for _, u := range e.Unanswered {
			if u.GetName() == queue[i] {
				return u
			}
		}
		for _, next := range needs[queue[i]] {
			if !slices.Contains(queue, next) {
				queue = append(queue, next)
			}
		}
	}
	return nil
}

// away adds that a service does not answer, with what is known of its process.
func (e *explainer) away(u *waitv1.Unanswered, since *timestamppb.Timestamp) {
	name, p := u.GetName(), e.Processes[u.GetName()]
	switch {
	case p.Stopped:
		e.because(wait.User, wait.ServiceStopped, since, fmt.Sprintf("%s at %s does not answer: its process (rolloutd, pid %d of this host) is stopped by a signal or a debugger", name, p.Address, p.PID),
			fmt.Sprintf("continue it: `kill -CONT %d`; the run then continues", p.PID))
	case p.PID != 0:
		e.because(name, wait.NoAnswer, since, fmt.Sprintf("%s at %s (rolloutd, pid %d of this host) does not answer: %s", name, p.Address, p.PID, u.GetError()),
			fmt.Sprintf("see the log of that process; if it hangs, end it (`kill %d`) and start it again: the run then continues", p.PID))
	default:
		e.because(name, wait.NoAnswer, since, name+" does not answer: "+u.GetError(),
			"see with `rollout status` where it ran, and on that host whether its rolloutd runs (start it again) or is stopped (`kill -CONT PID`); the run then continues")
	}
}

// does is what a run does in a phase, for people.
func (e *explainer) does(phase string) string {
	if phase == leasing {
		return fmt.Sprintf("it is sampling the groups of step %d of %d", e.run.GetStep()+1, e.run.GetTotalSteps())
	}
	return "it is " + strings.ToLower(phase) + " at step " + steps(e.run)
}

// nothing explains a run without a wait: if the learner has the step, what it does may be why.
func (e *explainer) nothing() {
	phase := cmp.Or(e.Status.GetPhase(), state(e.run.GetState()))
	last := e.because("rollout", "NOTHING", e.Status.GetWaitingSince(), "the run waits for nothing: "+e.does(phase), "")
	learner := func(w *runv1.Worker) bool { return w.GetKind() == "learner" }
	i := slices.IndexFunc(e.Status.GetWorkers(), learner)
	if phase != training || i < 0 {
		return
	}
	w := e.Status.GetWorkers()[i]
	cause := hindrance(w)
	if cause == nil && len(w.GetWaits()) > 0 && e.took(w.GetWaits()[0]) >= obvious {
		cause = w.GetWaits()[0]
	}
	if cause != nil {
		last.Owner, last.Reason, last.Evidence = w.GetWorkerId(), training, fmt.Sprintf("the run waits for %s to train step %d", w.GetWorkerId(), e.run.GetStep()+1)
		e.add(cause)
	}
}

// busy explains a phase in which named workers or a service do something.
func (e *explainer) busy(phase *waitv1.Wait) {
	last := e.head(phase)
	if silent := e.silent(phase.GetSubjects()...); silent != nil {
		e.away(silent, phase.GetSince())
		return
	}
	subjects := e.subjects(phase)
	for _, w := range subjects {
		if cause := hindrance(w); cause != nil {
			e.add(cause)
			return
		}
	}
	if absent := first(e.Status.GetWaits(), is(ofWorkers...)); absent != nil {
		e.workers(absent)
		return
	}
	for _, w := range subjects {
		if computes := first(w.GetWaits(), func(w *waitv1.Wait) bool { return w.GetGroups() == 0 && w.GetFailures() == 0 }); computes != nil {
			e.add(computes)
			return
		}
	}
	if len(subjects) == 0 && len(phase.GetSubjects()) > 0 { // a service
		last.Fix = cmp.Or(last.GetFix(), "it ends by itself; see the log of "+phase.GetSubjects()[0]+" for errors, and check its disk and its database with `rollout doctor`")
		return
	}
	last.Fix = cmp.Or(last.GetFix(), "it ends by itself; see the output of a worker with `rollout logs worker "+e.run.GetRunId()+" WORKER`")
}

// subjects are the workers that a wait is for.
func (e *explainer) subjects(w *waitv1.Wait) (out []*runv1.Worker) {
	for _, worker := range e.Status.GetWorkers() {
		if slices.Contains(w.GetSubjects(), worker.GetWorkerId()) {
			out = append(out, worker)
		}
	}
	return out
}

// workers explains that workers do not serve.
func (e *explainer) workers(w *waitv1.Wait) {
	last := e.head(w)
	for _, worker := range e.subjects(w) {
		if worker.GetHealthy() {
			continue
		}
		if cause := hindrance(worker); cause != nil {
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

// hindrance is the gravest reason why a worker does nothing; nil if it works.
func hindrance(w *runv1.Worker) *waitv1.Wait { return gravest(w.GetWaits(), hindrances) }

// groups explains that the learner waits for the batch of its next step.
func (e *explainer) groups(lacks *waitv1.Wait) {
	step := e.run.GetStep() + 1
	e.because("learner", leasing, lacks.GetSince(), fmt.Sprintf("the learner waits for the batch of step %d", step), "")
	last := e.because("buffer", lacks.GetReason(), lacks.GetSince(), "the buffer lacks "+lacks.GetEvidence()+e.missing(), lacks.GetFix())
	e.used[lacks] = true
	for _, w := range e.Status.GetWaits() { // the rest of what the buffer lacks
		if is(ofBuffer...)(w) && !e.used[w] {
			e.used[w] = true
			last.Evidence += "; " + w.GetEvidence()
		}
	}
	switch {
	case lacks.GetReason() == wait.NextAttempt:
		e.attempt(lacks)
	case lacks.GetReason() != wait.GroupsMissing, lacks.GetOwner() == wait.Producers:
	case lacks.GetOwner() == wait.Agents:
		e.agents()
	default:
		e.sampling()
	}
}

// attempt explains that groups failed.
func (e *explainer) attempt(lacks *waitv1.Wait) {
	if f := e.failed(); f != nil {
		e.failing(f)
		return
	}
	for _, g := range e.Missing {
		if g.GetState() == bufferv1.GroupState_GROUP_STATE_DISSOLVED {
			e.because("scheduler", "ISSUING_AGAIN", lacks.GetSince(), fmt.Sprintf("attempt %d of prompt %d failed: %s; the scheduler issues the next attempt", g.GetKey().GetAttempt(), g.GetPosition(), g.GetReason()),
				"see why with `rollout logs tail "+e.run.GetRunId()+" --level warn`")
			return
		}
	}
}

// agents explains that agents outside of the run have not closed their sessions.
func (e *explainer) agents() {
	found := gravest(e.Status.GetWaits(), ofGateway)
	if found == nil {
		return
	}
	e.used[found] = true
	e.add(found)
	if absent := first(e.Status.GetWaits(), is(ofWorkers...)); absent != nil && found.GetReason() == wait.WorkersMissing {
		e.workers(absent)
	}
}

// missing names the groups that have not arrived.
func (e *explainer) missing() string {
	var positions []uint64
	for _, g := range e.Missing {
		if g.GetState() != bufferv1.GroupState_GROUP_STATE_DISSOLVED {
			positions = append(positions, g.GetPosition())
		}
	}
	if len(positions) == 0 {
		return ""
	}
	return "; incomplete: " + prompts(positions, len(positions))
}

// held is a wait of groups that a worker has.
type held struct {
	worker *runv1.Worker
	wait   *waitv1.Wait
}

// sampling explains where the missing groups are.
func (e *explainer) sampling() {
	var all []held
	var idle, hindered []*runv1.Worker
	sampling := map[string]bool{}
	for _, w := range e.Status.GetWorkers() {
		if w.GetKind() != "inference" && w.GetKind() != "environment" || w.GetReserved() {
			continue
		}
		sampling[w.GetWorkerId()] = true
		if !w.GetHealthy() {
			continue
		}
		if w.GetKind() == "environment" { // groups are with the inference workers
			if hindrance(w) != nil {
				hindered = append(hindered, w)
			}
			continue
		}
		groups := slices.DeleteFunc(slices.Clone(w.GetWaits()), func(w *waitv1.Wait) bool { return w.GetGroups() == 0 || w.GetFailures() > 0 })
		switch {
		case hindrance(w) != nil:
			hindered = append(hindered, w)
		case len(groups) == 0:
			idle = append(idle, w)
		}
		for _, wait := range groups {
			all = append(all, held{w, wait})
		}
	}
	gone := first(e.Status.GetWaits(), func(w *waitv1.Wait) bool {
		return is(ofWorkers...)(w) && slices.ContainsFunc(w.GetSubjects(), func(id string) bool { return sampling[id] })
	})
	slowest := e.slowest(all)
	writes := first(e.Status.GetWaits(), is(wait.IngestFails))
	equal := first(e.Status.GetWaits(), is(wait.EqualRewards))
	failed := e.failed()
	brisk := len(hindered) == 0 && gone == nil && (slowest == nil || e.took(slowest.wait) < obvious)
	switch {
	case writes != nil && brisk:
		e.known(writes)
	case equal != nil && brisk:
		e.known(equal)
	case failed != nil && brisk:
		e.failing(failed)
	case len(hindered) > 0 && (slowest == nil || e.took(slowest.wait) < obvious || !passing(hindrance(hindered[0]))):
		e.add(hindrance(hindered[0]))
	case gone != nil && slowest != nil && slowest.wait.GetReason() == wait.EnvironmentWorker && slices.Contains(gone.GetSubjects(), slowest.wait.GetOwner()):
		e.workers(gone)
	case slowest != nil && (gone == nil || e.took(slowest.wait) >= obvious):
		e.doing(slowest)
	case gone != nil:
		e.workers(gone)
	case len(idle) > 0:
		e.lost(idle)
	}
}

// cause is why attempts of missing groups failed.
type cause struct {
	wait      *waitv1.Wait
	positions []uint64
}

// failed is why the last attempt of most of the missing groups failed; nil if none failed. Of each
// group the newest failure counts, of any worker: earlier ones may have had other reasons.
func (e *explainer) failed() *cause {
	newest := map[uint64]*waitv1.Wait{}
	for _, w := range e.Status.GetWorkers() {
		for _, wait := range w.GetWaits() {
			if wait.GetFailures() == 0 {
				continue
			}
			for _, position := range wait.GetPositions() {
				if known := newest[position]; known == nil || wait.GetSince().AsTime().After(known.GetSince().AsTime()) {
					newest[position] = wait
				}
			}
		}
	}
	reasons := map[*waitv1.Wait]*cause{}
	var all []*cause
	for _, g := range e.Missing {
		w := newest[g.GetPosition()]
		if w == nil {
			continue
		}
		if reasons[w] == nil {
			reasons[w] = &cause{wait: w}
			all = append(all, reasons[w])
		}
		f := reasons[w]
		if !slices.Contains(f.positions, g.GetPosition()) {
			f.positions = append(f.positions, g.GetPosition())
		}
	}
	if len(all) == 0 {
		return nil
	}
	return slices.MaxFunc(all, func(a, b *cause) int {
		return cmp.Or(cmp.Compare(len(a.positions), len(b.positions)), a.wait.GetSince().AsTime().Compare(b.wait.GetSince().AsTime()))
	})
}

// failing explains that attempts of the missing groups fail again and again.
func (e *explainer) failing(f *cause) {
	slices.Sort(f.positions)
	e.because("scheduler", "ISSUING_AGAIN", nil, fmt.Sprintf("attempts of %s failed, and are made again (limits.group_attempts)", prompts(f.positions, len(f.positions))), "")
	e.add(f.wait)
}

// known adds a wait that the buffer reports as the reason.
func (e *explainer) known(w *waitv1.Wait) {
	e.used[w] = true
	root := proto.CloneOf(w)
	root.Evidence = "it waits for " + w.GetEvidence()
	e.add(root)
}

// passing reports whether a hindrance usually ends by itself.
func passing(w *waitv1.Wait) bool {
	return slices.Contains([]string{wait.EnginePaused, "ENGINE_DRAINS", wait.WeightsRefused}, w.GetReason())
}

// took is how long the first group of a wait has been in it.
func (e *explainer) took(w *waitv1.Wait) time.Duration { return e.Time.Sub(w.GetSince().AsTime()) }

// slowest is the wait that explains the others best: the longest one that is not for a slot, which
// waits for the other groups of its worker.
func (e *explainer) slowest(all []held) *held {
	if len(all) == 0 {
		return nil
	}
	slot := func(h held) int {
		if h.wait.GetReason() == wait.Slot {
			return 0
		}
		return 1
	}
	worst := slices.MaxFunc(all, func(a, b held) int {
		return cmp.Or(cmp.Compare(slot(a), slot(b)), cmp.Compare(e.took(a.wait), e.took(b.wait)))
	})
	return &worst
}

// doing explains what a worker does with the missing groups.
func (e *explainer) doing(h *held) {
	id := h.worker.GetWorkerId()
	are := "are"
	if h.wait.GetGroups() == 1 {
		are = "is"
	}
	e.because(id, "SAMPLING", h.wait.GetSince(), fmt.Sprintf("%s %s with %s", prompts(h.wait.GetPositions(), int(h.wait.GetGroups())), are, id), "")
	e.add(h.wait)
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
	e.because(wait.NATS, wait.NotWithWorkers, nil, fmt.Sprintf("%s issued, and no worker has them: %s wait for work. They are on the work stream of NATS, or were lost there", count(int(q.GetInFlight()), "group"), strings.Join(ids, ", ")),
		"the scheduler issues lost groups again; if this lasts, check NATS with `rollout doctor`")
}
