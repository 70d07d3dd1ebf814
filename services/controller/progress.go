package controller

import (
	"cmp"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/wait"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// progress is the newest progress of a drive. It wakes watchers at each change, and emits an event
// when the phase changes.
type progress struct {
	events *reporter

	mu      sync.Mutex
	now     *learnerv1.Progress
	changed chan struct{} // closed and replaced at each change
}

func newProgress(events *reporter, now *learnerv1.Progress) *progress {
	return &progress{events: events, now: now, changed: make(chan struct{})}
}

// update changes the progress. It wakes watchers only if something is different afterwards.
func (p *progress) update(change func(now *learnerv1.Progress)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := proto.CloneOf(p.now)
	change(next)
	if proto.Equal(next, p.now) {
		return
	}
	p.now = next
	close(p.changed)
	p.changed = make(chan struct{})
}

// read returns the progress, which the caller must not change, and a channel that is closed when it
// is out of date.
func (p *progress) read() (*learnerv1.Progress, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.now, p.changed
}

func (p *progress) phase() learnerv1.Phase {
	now, _ := p.read()
	return now.GetPhase()
}

// enter moves to a phase, which waits for nothing yet.
func (p *progress) enter(phase learnerv1.Phase) {
	before := p.phase()
	p.update(func(now *learnerv1.Progress) { now.Phase, now.Waits, now.Wait = phase, nil, nil })
	if before != phase {
		now, _ := p.read()
		p.events.phase(now)
	}
}

// end moves to a final phase; message explains a failure.
func (p *progress) end(phase learnerv1.Phase, message string) {
	p.update(func(now *learnerv1.Progress) {
		now.Phase, now.Waits, now.Message, now.Wait = phase, nil, message, nil
	})
	now, _ := p.read()
	p.events.phase(now)
}

// waitFor replaces what the drive waits for within its phase. A wait without a reason gets the name
// of the phase, one without an owner the worker that it is for.
func (p *progress) waitFor(waits ...*waitv1.Wait) {
	p.update(func(now *learnerv1.Progress) {
		for _, w := range waits {
			w.Reason = cmp.Or(w.GetReason(), phaseName(now.GetPhase()))
			if w.GetOwner() == "" && len(w.GetSubjects()) == 1 {
				w.Owner = w.GetSubjects()[0]
			}
			w.Owner = cmp.Or(w.GetOwner(), wait.Worker)
		}
		now.Waits = waits
	})
}

// answered ends the wait for an answer of a service.
func (p *progress) answered(service string) {
	p.update(func(now *learnerv1.Progress) {
		now.Waits = slices.DeleteFunc(now.Waits, func(w *waitv1.Wait) bool { return w.GetReason() == wait.NoAnswer && w.GetOwner() == service })
	})
}

func phaseName(p learnerv1.Phase) string { return strings.TrimPrefix(p.String(), "PHASE_") }

// work is the wait for what workers do.
func work(does string, workers ...string) *waitv1.Wait {
	return &waitv1.Wait{Subjects: workers[:min(len(workers), mostSubjects)], Evidence: enumerate(workers) + " " + does}
}

// mostSubjects is the number of workers that a wait lists.
const mostSubjects = 32

// service is the wait for what a service does.
func service(name, evidence string) *waitv1.Wait {
	return &waitv1.Wait{Owner: name, Subjects: []string{name}, Evidence: evidence}
}

// stall shows that the drive waits for space on a disk, and what is missing there; "": it does not.
func (p *progress) stall(missing string) {
	p.update(func(now *learnerv1.Progress) {
		if missing == "" {
			now.Wait = nil
			return
		}
		now.Wait = wait.ForDisk(missing)
	})
}

// committed records the last committed step.
func (p *progress) committed(step uint64) {
	p.update(func(now *learnerv1.Progress) { now.Step = step })
}

// lagging reports workers that can't follow an update, as events and in the progress. It implements
// observer.
type lagging struct {
	*reporter
	progress *progress
}

func (l *lagging) leftOut(worker string, version uint64, err error) {
	l.reporter.leftOut(worker, version, err)
	l.change(worker, &learnerv1.LaggingWorker{WorkerId: worker, Version: version, Message: rpcerr.Text(err), Reason: rpcerr.Reason(err)})
}

func (l *lagging) caughtUp(worker string, m *weightsv1.WeightsManifest) {
	l.change(worker, nil)
	if m != nil {
		l.reporter.caughtUp(worker, m)
	}
}

// change replaces what the progress says of a worker; nil: nothing.
func (l *lagging) change(worker string, now *learnerv1.LaggingWorker) {
	l.progress.update(func(p *learnerv1.Progress) {
		p.Lagging = slices.DeleteFunc(p.Lagging, func(other *learnerv1.LaggingWorker) bool { return other.GetWorkerId() == worker })
		if now != nil {
			p.Lagging = append(p.Lagging, now)
		}
	})
}
