package ingest

import (
	"context"
	"slices"
	"sync"
)

// FairQueue lets a few groups be committed at a time, and shares them fairly among runs by the
// bytes of their groups (start-time fair queueing; Goyal, Vin and Cheng 1996): of runs that always
// have work, none gets ahead of another by more than one group of each, however large the groups
// are. Safe for concurrent use.
type FairQueue struct {
	mu      sync.Mutex
	free    int               // groups that may start now
	clock   uint64            // virtual time: the start of the last group that was let in
	ends    map[string]uint64 // by run, the virtual time at which its groups so far end
	waiting []*entry          // in order of arrival
}

type entry struct {
	start uint64 // virtual time
	open  chan struct{}
}

// NewFairQueue lets so many groups be committed at a time.
func NewFairQueue(groups int) *FairQueue { return &FairQueue{free: groups, ends: map[string]uint64{}} }

// Enter waits until a group of so many bytes may start. The caller calls leave at its end. A run
// has one group at a time.
func (q *FairQueue) Enter(ctx context.Context, run string, bytes uint64) (leave func(), err error) {
	e := q.queue(run, bytes)
	select {
	case <-e.open:
		return q.leave, nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	at := slices.Index(q.waiting, e)
	if at >= 0 {
		q.waiting = slices.Delete(q.waiting, at, at+1)
	}
	q.mu.Unlock()
	if at < 0 { // the queue admitted it at the same moment
		q.leave()
	}
	return nil, ctx.Err()
}

func (q *FairQueue) queue(run string, bytes uint64) *entry {
	q.mu.Lock()
	defer q.mu.Unlock()
	e := &entry{start: max(q.clock, q.ends[run]), open: make(chan struct{})} // an idle run saves up no credit
	q.ends[run] = e.start + max(1, bytes)
	q.waiting = append(q.waiting, e)
	q.admit()
	return e
}

func (q *FairQueue) leave() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.free++
	q.admit()
}

// admit lets in the groups with the earliest virtual start. The caller holds the lock.
func (q *FairQueue) admit() {
	for q.free > 0 && len(q.waiting) > 0 {
		first := 0
		for i, e := range q.waiting {
			if e.start < q.waiting[first].start {
				first = i
			}
		}
		e := q.waiting[first]
		q.waiting = slices.Delete(q.waiting, first, first+1)
		q.free--
		q.clock = e.start
		close(e.open)
	}
}

// Forget removes a run that was closed.
func (q *FairQueue) Forget(run string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.ends, run)
}
