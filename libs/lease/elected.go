package lease

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Service is a service that a process hosts.
type Service interface {
	Register(grpc.ServiceRegistrar)
	Run(ctx context.Context) error
}

// Elected is a Service of which one replica acts: each term has its own instance, created when it
// begins and stopped when it ends, so that nothing that one term remembered reaches the next. Calls
// to a replica that does not lead are passed on.
type Elected struct {
	candidate *Candidate
	make      func(epoch uint64) (Service, error)
	began     func(ctx context.Context, epoch uint64) func()
	router    *router
	shape     *record
}

// Options of an Elected.
type Options struct {
	Candidate *Candidate
	// Shape registers the gRPC services that every instance has, with nil as their implementation.
	Shape func(grpc.ServiceRegistrar)
	// Make creates the instance for a term. Its store writes with Table.Fence(epoch).
	Make func(epoch uint64) (Service, error)
	// Forward connects to the leader; nil: calls to another replica are refused with ErrNotLeader.
	Forward func() (grpc.ClientConnInterface, error)
	// Began is called when a term has begun and serves. The returned function is called when the term
	// ends. May be nil.
	Began func(ctx context.Context, epoch uint64) (ended func())
}

// NewElected makes an Elected.
func NewElected(o Options) *Elected {
	e := &Elected{candidate: o.Candidate, make: o.Make, began: o.Began, shape: newRecord()}
	e.router = &router{forward: o.Forward, address: o.Candidate.Address, leader: o.Candidate.Leader, failure: o.Candidate.Failure}
	o.Shape(e.shape)
	return e
}

// Register implements Service.
func (e *Elected) Register(r grpc.ServiceRegistrar) { e.router.register(r, e.shape) }

// Run implements Service.
func (e *Elected) Run(ctx context.Context) error { return e.candidate.Run(ctx, e.lead) }

func (e *Elected) lead(ctx context.Context, term *Term) error {
	s, err := e.make(term.Epoch)
	if err != nil {
		return e.give(ctx, fmt.Errorf("begin term %d: %w", term.Epoch, err))
	}
	r := newRecord()
	s.Register(r)
	e.router.set(&activeTerm{ctx: ctx, term: term, impls: r.impls})
	defer e.router.set(nil)
	if e.began != nil {
		defer e.began(ctx, term.Epoch)()
	}
	return e.give(ctx, s.Run(ctx))
}

// give returns the error that ends the process, or nil if another term may succeed.
func (e *Elected) give(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, ErrFenced): // another leads already; the renewal is about to notice
		<-ctx.Done()
		return nil
	case rpcerr.Code(err) == codes.Unavailable:
		e.candidate.Log.WarnContext(ctx, "a term ended early", "error", err)
		return nil
	}
	return err
}
