// Package lifecycle runs the components of a process and stops them in order.
//
// A component is a name and a Run(ctx) error that returns when ctx ends. Components stop in the
// reverse of the order they were added, each only after those added later have returned: what
// serves others (the bus, the registry) is added first and ends last.
//
//	running --first error, ctx end or first signal--> draining: components end last to first
//	draining --grace passed or second signal--> stopped hard: every context is canceled, Run returns ErrHardStop
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// ErrHardStop means that a component was still running when the grace period ended or a second
// signal arrived.
var ErrHardStop = errors.New("stopped hard")

// Component is one part of a process.
type Component struct {
	Name string
	// Run blocks until its part is done. It returns nil after ctx ends; nil before that ends the
	// process in good order.
	Run func(ctx context.Context) error
}

// Group is a list of components. The zero value is ready.
type Group struct {
	Log   *slog.Logger  // nil discards
	Grace time.Duration // how long a drain may take in all; zero waits forever

	components []Component
}

// Add appends a component; it will stop before those added earlier.
func (g *Group) Add(name string, run func(ctx context.Context) error) {
	g.components = append(g.components, Component{Name: name, Run: run})
}

type exit struct {
	index int
	err   error
}

// Run starts every component and waits for all of them. The end of ctx starts a drain, the end of
// hard stops at once. The error is the first failure of a component, joined with ErrHardStop if
// some did not return.
func (g *Group) Run(ctx, hard context.Context) error {
	log := g.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	n := len(g.components)
	exits := make(chan exit, n)
	cancels := make([]context.CancelFunc, n)
	for i, c := range g.components {
		var cctx context.Context
		cctx, cancels[i] = context.WithCancel(context.WithoutCancel(ctx))
		defer cancels[i]()
		go func() { exits <- exit{i, runGuarded(cctx, c)} }()
	}

	gone := make([]bool, n)
	left := n
	var first error
	note := func(e exit) {
		gone[e.index], left = true, left-1
		name := g.components[e.index].Name
		if e.err != nil && !errors.Is(e.err, context.Canceled) {
			log.Error("component failed", "component", name, "error", e.err)
			if first == nil {
				first = fmt.Errorf("%s: %w", name, e.err)
			}
			return
		}
		log.Debug("component ended", "component", name)
	}

	if n == 0 {
		return nil
	}
	select {
	case <-ctx.Done():
	case <-hard.Done():
	case e := <-exits:
		note(e)
	}
	log.Debug("draining", "components", left)
	var grace <-chan time.Time
	if g.Grace > 0 {
		timer := time.NewTimer(g.Grace)
		defer timer.Stop()
		grace = timer.C
	}
	for i := n - 1; i >= 0; i-- {
		cancels[i]()
		for !gone[i] {
			select {
			case e := <-exits:
				note(e)
			case <-hard.Done():
				return g.stopHard(first, gone)
			case <-grace:
				return g.stopHard(first, gone)
			}
		}
	}
	return first
}

// stopHard logs the components that were still running, which helps to explain a stall.
func (g *Group) stopHard(first error, gone []bool) error {
	var names []string
	for i, c := range g.components {
		if !gone[i] {
			names = append(names, c.Name)
		}
	}
	return errors.Join(first, fmt.Errorf("%w: still running: %v", ErrHardStop, names))
}

// runGuarded turns a panic into an error, so that the other components still drain.
func runGuarded(ctx context.Context, c Component) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, stack())
		}
	}()
	return c.Run(ctx)
}
