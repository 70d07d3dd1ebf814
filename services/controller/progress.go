package controller

import (
	"fmt"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
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

// enter moves to a phase; waitingFor names the owner of the wait and the reason.
func (p *progress) enter(phase learnerv1.Phase, waitingFor string) {
	before := p.phase()
	p.update(func(now *learnerv1.Progress) { now.Phase, now.WaitingFor, now.Wait = phase, waitingFor, nil })
	if before != phase {
		now, _ := p.read()
		p.events.phase(now)
	}
}

// end moves to a final phase; message explains a failure.
func (p *progress) end(phase learnerv1.Phase, message string) {
	p.update(func(now *learnerv1.Progress) {
		now.Phase, now.WaitingFor, now.Message, now.Wait = phase, "", message, nil
	})
	now, _ := p.read()
	p.events.phase(now)
}

// waitFor names what the drive waits for within its phase.
func (p *progress) waitFor(format string, args ...any) {
	p.update(func(now *learnerv1.Progress) { now.WaitingFor = fmt.Sprintf(format, args...) })
}

// stall shows that the drive waits for space on a disk, and what is missing there; "": it does not.
func (p *progress) stall(missing string) {
	p.update(func(now *learnerv1.Progress) {
		if missing == "" {
			now.Wait = nil
			return
		}
		now.Wait = &waitv1.Wait{
			Owner: "user", Reason: rpcerr.ReasonDiskFull, Evidence: "space on the disk: " + missing, Fix: rpcerr.Fix(rpcerr.ErrDiskFull),
		}
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
	l.change(worker, &learnerv1.LaggingWorker{WorkerId: worker, Version: version, Message: rpcerr.Text(err)})
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
