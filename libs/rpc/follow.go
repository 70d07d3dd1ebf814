package rpc

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/resolver"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// ErrMoved ends a call in flight when another process serves the service now: the previous process
// may be suspended, and would be waited for until its connection is found out.
var ErrMoved = rpcerr.New(codes.Unavailable, "SERVICE_MOVED", "another process serves this now").RetryAfter(50 * time.Millisecond)

// follower ends the calls of one connection when discovery names other addresses, and none of those
// from before.
type follower struct {
	mu   sync.Mutex
	last []string
	ctx  context.Context // of calls to the addresses in last
	end  context.CancelCauseFunc
}

func newFollower() *follower {
	f := &follower{}
	f.ctx, f.end = context.WithCancelCause(context.Background())
	return f
}

// see takes a list of addresses. An empty list changes nothing, because the instances may come
// back.
func (f *follower) see(addresses []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(addresses) == 0 {
		return
	}
	moved := len(f.last) > 0 && !slices.ContainsFunc(addresses, func(a string) bool { return slices.Contains(f.last, a) })
	f.last = addresses
	if moved {
		f.end(ErrMoved)
		f.ctx, f.end = context.WithCancelCause(context.Background())
	}
}

// bind ends a call's context with the addresses that it may have been sent to.
func (f *follower) bind(ctx context.Context) (context.Context, func()) {
	f.mu.Lock()
	life := f.ctx
	f.mu.Unlock()
	bound, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(life, func() { cancel(ErrMoved) })
	return bound, func() { stop(); cancel(nil) }
}

func explain(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), ErrMoved) {
		return ErrMoved
	}
	return err
}

func (f *follower) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	ctx, done := f.bind(ctx)
	defer done()
	return explain(ctx, invoke(ctx, method, req, reply, cc, opts...))
}

func (f *follower) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	ctx, done := f.bind(ctx)
	s, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		err = explain(ctx, err)
		done()
		return nil, err
	}
	context.AfterFunc(s.Context(), done) // a stream's context ends with the stream
	return &followed{s, ctx}, nil
}

// followed is a stream that reports why it ended.
type followed struct {
	grpc.ClientStream
	bound context.Context
}

func (s *followed) RecvMsg(m any) error { return explain(s.bound, s.ClientStream.RecvMsg(m)) }

// watched passes the results of a resolver to a follower.
type watched struct {
	resolver.Builder
	follower *follower
}

func (w watched) Build(target resolver.Target, cc resolver.ClientConn, o resolver.BuildOptions) (resolver.Resolver, error) {
	return w.Builder.Build(target, watchedConn{cc, w.follower}, o)
}

type watchedConn struct {
	resolver.ClientConn
	follower *follower
}

func (c watchedConn) UpdateState(s resolver.State) error {
	err := c.ClientConn.UpdateState(s)
	var addresses []string
	for _, a := range s.Addresses {
		addresses = append(addresses, a.Addr)
	}
	c.follower.see(addresses)
	return err
}
