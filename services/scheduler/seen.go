package scheduler

import (
	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// update changes the view and wakes whoever waits for a change.
func (c *conductor) update(change func(*view)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.view)
	c.view.settle(c.svc.Now().UTC())
	close(c.changed)
	c.changed = make(chan struct{})
}

// changes is closed at the next change of the view.
func (c *conductor) changes() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// see takes a record over. The caller holds records, so that views change in the order of the writes.
func (c *conductor) see(run *Run) { c.update(func(v *view) { v.run = run }) }

func (c *conductor) seeLedger(l *bufferv1.LedgerState) { c.update(func(v *view) { v.ledger = l }) }

func (c *conductor) seePosition(p uint64) {
	c.update(func(v *view) { v.position, v.first, v.rows = p, c.window.First, c.rows })
}

func (c *conductor) seeProgress(p *learnerv1.Progress) {
	if p != nil {
		c.update(func(v *view) { v.progress = p })
	}
}

// waitFor shows what is waited for and why; an empty why takes it off.
func (c *conductor) waitFor(what, why string) {
	c.mu.Lock()
	same := c.view.waits[what] == why
	c.mu.Unlock()
	if same {
		return
	}
	c.update(func(v *view) {
		if v.waits[what] = why; why == "" {
			delete(v.waits, what)
		}
	})
}

func (c *conductor) ledger() *bufferv1.LedgerState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view.ledger
}

func (c *conductor) state() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view.run.GetState()
}

// record is the run's record as it was seen last.
func (c *conductor) record() *Run {
	c.mu.Lock()
	defer c.mu.Unlock()
	return proto.CloneOf(c.view.run)
}

func (c *conductor) queues() *runv1.Queues {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view.queues()
}

func (c *conductor) progress() *learnerv1.Progress {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view.progress
}
