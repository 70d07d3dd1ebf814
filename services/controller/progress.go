package controller

import (
	"sync"

	"google.golang.org/protobuf/proto"

	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
)

// board holds the newest progress of a drive and wakes those who watch it.
type board struct {
	mu      sync.Mutex
	now     *learnerv1.Progress
	changed chan struct{} // closed and replaced at each change
}

func newBoard(p *learnerv1.Progress) *board { return &board{now: p, changed: make(chan struct{})} }

// update changes the progress; what did not change wakes nobody.
func (b *board) update(change func(p *learnerv1.Progress)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := proto.CloneOf(b.now)
	change(next)
	if proto.Equal(next, b.now) {
		return
	}
	b.now = next
	close(b.changed)
	b.changed = make(chan struct{})
}

// read returns the progress, which the caller must not change, and a channel that is closed when it is out of date.
func (b *board) read() (*learnerv1.Progress, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now, b.changed
}
