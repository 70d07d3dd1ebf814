package scheduler

import (
	"context"
	"sync"
)

// conductors owns the conductors of the active runs. Safe for concurrent use.
type conductors struct {
	cfg     Config
	deps    Deps
	records *records

	base context.Context // ends when the scheduler stops
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu       sync.Mutex
	stopping bool
	byRun    map[string]*conductor
}

func newConductors(cfg Config, deps Deps, records *records) *conductors {
	c := &conductors{cfg: cfg, deps: deps, records: records, byRun: map[string]*conductor{}}
	c.base, c.stop = context.WithCancel(context.Background())
	return c
}

// start begins to conduct a run.
func (c *conductors) start(run *Run) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopping {
		return ErrStopping
	}
	conductor := newConductor(c, run)
	c.byRun[run.GetRunId()] = conductor
	detach := c.records.attach(run.GetRunId(), conductor.board)
	c.wg.Go(func() {
		conductor.conduct(c.base)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.byRun[conductor.run] == conductor {
			delete(c.byRun, conductor.run)
		}
		detach()
	})
	return nil
}

// get returns the conductor of a run; nil if the run is not active here.
func (c *conductors) get(runID string) *conductor {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byRun[runID]
}

// count is the number of active runs.
func (c *conductors) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.byRun)
}

// shutdown interrupts every run and waits for the conductors.
func (c *conductors) shutdown() {
	c.mu.Lock()
	c.stopping = true
	c.mu.Unlock()
	c.stop()
	c.wg.Wait()
}
