package buffer

import (
	"context"
	"slices"
	"sync"
)

// gate lets a few ingests at a time pass, and deals them out fairly among runs by the bytes that each brings (start-time fair
// queueing; Goyal, Vin and Cheng 1996): of runs that all have work, none gets ahead of another by more than one batch of each, however
// large the batches of one are.
type gate struct {
	mu      sync.Mutex
	free    int               // passes
	clock   uint64            // virtual time: the start of who was let in last
	ends    map[string]uint64 // by run, virtual time at which what it brought so far ends
	waiting []*entry          // in order of arrival
}

type entry struct {
	start uint64 // virtual time
	open  chan struct{}
}

func newGate(passes int) *gate { return &gate{free: passes, ends: map[string]uint64{}} }

// enter waits for a pass for so many bytes of a run. The caller gives it back with leave. A run has one ingest at a time.
func (g *gate) enter(ctx context.Context, run string, bytes uint64) (leave func(), err error) {
	e := g.queue(run, bytes)
	select {
	case <-e.open:
		return g.leave, nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	at := slices.Index(g.waiting, e)
	if at >= 0 {
		g.waiting = slices.Delete(g.waiting, at, at+1)
	}
	g.mu.Unlock()
	if at < 0 { // let in at this very moment
		g.leave()
	}
	return nil, ctx.Err()
}

func (g *gate) queue(run string, bytes uint64) *entry {
	g.mu.Lock()
	defer g.mu.Unlock()
	e := &entry{start: max(g.clock, g.ends[run]), open: make(chan struct{})} // who was idle has saved nothing up
	g.ends[run] = e.start + max(1, bytes)
	g.waiting = append(g.waiting, e)
	g.admit()
	return e
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.free++
	g.admit()
}

// admit lets in whoever began earliest in virtual time. The caller holds the lock.
func (g *gate) admit() {
	for g.free > 0 && len(g.waiting) > 0 {
		first := 0
		for i, e := range g.waiting {
			if e.start < g.waiting[first].start {
				first = i
			}
		}
		e := g.waiting[first]
		g.waiting = slices.Delete(g.waiting, first, first+1)
		g.free--
		g.clock = e.start
		close(e.open)
	}
}

// forget drops a run that is closed.
func (g *gate) forget(run string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.ends, run)
}
