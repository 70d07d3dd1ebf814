package scheduler

import (
	"context"
	"sync"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// service is the use cases: those that people ask for in create.go, pause.go and cancel.go, and in takeover.go what a process that died
// left behind. Its methods may be called from many goroutines.
type service struct {
	cfg Config
	Deps

	base context.Context // of conductors; ends when the service stops
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu         sync.Mutex
	stopping   bool
	conductors map[string]*conductor
}

func newService(cfg Config, deps Deps) *service {
	s := &service{cfg: cfg, Deps: deps, conductors: map[string]*conductor{}}
	s.base, s.stop = context.WithCancel(context.Background())
	return s
}

// conduct starts the conductor of a run.
func (s *service) conduct(run *Run) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		return ErrStopping
	}
	c := newConductor(s, run)
	s.conductors[run.GetRunId()] = c
	s.wg.Go(func() {
		c.run(s.base)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.conductors[c.id] == c {
			delete(s.conductors, c.id)
		}
	})
	return nil
}

func (s *service) conductor(runID string) *conductor {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conductors[runID]
}

// conducted is how many runs go on here.
func (s *service) conducted() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conductors)
}

// shutdown interrupts every run and waits for the conductors.
func (s *service) shutdown() {
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	s.stop()
	s.wg.Wait()
}

// transient reports whether a call may succeed when it is repeated.
func transient(err error) bool {
	switch rpcerr.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted, codes.Canceled:
		return true
	}
	return false
}
