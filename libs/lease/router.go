package lease

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// forwardedKey marks a call that a replica passed on, so that two replicas that disagree don't pass
// it to and fro.
const forwardedKey = "rollout-forwarded"

// router is registered with the gRPC server, which needs its services before it serves, and
// forwards each call to the implementation of the current term, or to the leader if another process
// leads.
type router struct {
	forward func() (grpc.ClientConnInterface, error) // to the leader; nil: calls are refused
	address string                                   // of this process
	leader  func() Lease
	failure func() error // why this process can't lead; nil if it can

	mu   sync.Mutex
	open *activeTerm // nil: this process does not lead
}

// activeTerm is the term that the router sends calls to.
type activeTerm struct {
	ctx   context.Context // ends with the term
	term  *Term
	impls map[string]any // by the name of the gRPC service
}

func (g *router) set(o *activeTerm) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = o
}

// enter returns the current term, or ErrNotLeader with why this process does not lead.
func (g *router) enter() (*activeTerm, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open == nil || !g.open.term.Valid() || g.open.ctx.Err() != nil {
		e := ErrNotLeader
		l := g.leader()
		if l.Address != "" {
			e = e.With("leader", l.Address)
		}
		if err := g.failure(); err != nil && (l.Address == "" || l.Address == g.address) {
			e = e.WithMessage("no replica leads this service: %s", rpcerr.Text(err)).With(Cause, rpcerr.Reason(err))
			if fix := rpcerr.Fix(err); fix != "" {
				e = e.Fix(fix)
			}
		}
		return nil, e
	}
	return g.open, nil
}

// bind ends a call's context with the term, with ErrNotLeader as its cause.
func (o *activeTerm) bind(ctx context.Context) (context.Context, func()) {
	bound, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(o.ctx, func() { cancel(ErrNotLeader) })
	return bound, func() { stop(); cancel(nil) }
}

// record stores the handlers that a service registers.
type record struct {
	descs []*grpc.ServiceDesc
	impls map[string]any
}

func newRecord() *record { return &record{impls: map[string]any{}} }

// RegisterService implements grpc.ServiceRegistrar.
func (r *record) RegisterService(desc *grpc.ServiceDesc, impl any) {
	r.descs = append(r.descs, desc)
	r.impls[desc.ServiceName] = impl
}

// register registers the router in place of the recorded implementations.
func (g *router) register(to grpc.ServiceRegistrar, r *record) {
	for _, desc := range r.descs {
		d := *desc
		d.Methods, d.Streams = nil, nil
		for _, m := range desc.Methods {
			d.Methods = append(d.Methods, grpc.MethodDesc{MethodName: m.MethodName, Handler: g.unary(desc.ServiceName, m)})
		}
		for _, s := range desc.Streams {
			s.Handler = g.stream(desc.ServiceName, s)
			d.Streams = append(d.Streams, s)
		}
		to.RegisterService(&d, nil)
	}
}

func (g *router) unary(service string, m grpc.MethodDesc) grpc.MethodHandler {
	return func(_ any, ctx context.Context, decode func(any) error, outer grpc.UnaryServerInterceptor) (any, error) {
		o, refused := g.enter()
		var impl any
		if refused == nil {
			impl = o.impls[service]
		}
		inner := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			guarded := func(ctx context.Context, req any) (any, error) {
				if refused != nil {
					return g.pass(ctx, service, m.MethodName, req, refused)
				}
				ctx, done := o.bind(ctx)
				defer done()
				resp, err := handle(ctx, req)
				if err != nil && errors.Is(context.Cause(ctx), ErrNotLeader) { // the term ended under the call
					err = ErrNotLeader
				}
				return resp, err
			}
			if outer == nil {
				return guarded(ctx, req)
			}
			return outer(ctx, req, info, guarded)
		}
		return m.Handler(impl, ctx, decode, inner)
	}
}

func (g *router) stream(service string, s grpc.StreamDesc) grpc.StreamHandler {
	handle := s.Handler
	return func(_ any, ss grpc.ServerStream) error {
		o, refused := g.enter()
		if refused != nil {
			return g.passStream(ss, service, s, refused)
		}
		ctx, done := o.bind(ss.Context())
		defer done()
		err := handle(o.impls[service], &stream{ServerStream: ss, ctx: ctx})
		if err != nil && errors.Is(context.Cause(ctx), ErrNotLeader) {
			err = ErrNotLeader
		}
		return err
	}
}

// stream is a ServerStream with another context.
type stream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *stream) Context() context.Context { return s.ctx }

func forwarded(ctx context.Context) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	return len(md.Get(forwardedKey)) > 0
}
