package scheduler_test

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
)

// gate lets nothing through once it is closed.
type gate struct {
	closed atomic.Bool
	away   atomic.Int32 // so many reads of a cursor fail
	frozen atomic.Pointer[freeze]
}

// freeze is where a process stands still, until it is thawed.
type freeze struct {
	at            string
	reached, thaw chan struct{}
}

func (g *gate) freeze(at string) *freeze {
	f := &freeze{at: at, reached: make(chan struct{}), thaw: make(chan struct{})}
	g.frozen.Store(f)
	return f
}

// pass is err for a call at which the process may stand still.
func (g *gate) pass(at string) error {
	if f := g.frozen.Load(); f != nil && f.at == at && g.frozen.CompareAndSwap(f, nil) {
		close(f.reached)
		<-f.thaw
	}
	return g.err()
}

func (g *gate) close() { g.closed.Store(true) }

func (g *gate) err() error {
	if g.closed.Load() {
		return status.Error(codes.Unavailable, "this process is dead")
	}
	return nil
}

type gatedStore struct {
	scheduler.Store
	gate *gate
}

func (s gatedStore) Cursor(ctx context.Context, run string) (scheduler.Cursor, error) {
	if s.gate.away.Add(-1) >= 0 {
		return scheduler.Cursor{}, sqldb.ErrUnavailable
	}
	return s.Store.Cursor(ctx, run)
}

func (s gatedStore) Update(ctx context.Context, run string, change func(*scheduler.Run) error) (*scheduler.Run, error) {
	if err := s.gate.err(); err != nil {
		return nil, err
	}
	return s.Store.Update(ctx, run, change)
}

func (s gatedStore) Advance(ctx context.Context, run string, from, to uint64) error {
	if err := s.gate.err(); err != nil {
		return err
	}
	return s.Store.Advance(ctx, run, from, to)
}

func (s gatedStore) KeepQueues(ctx context.Context, run string, q *runv1.Queues) error {
	if err := s.gate.err(); err != nil {
		return err
	}
	return s.Store.KeepQueues(ctx, run, q)
}

type gatedBus struct {
	gate *gate
	scheduler.Bus
}

func (b gatedBus) Publish(ctx context.Context, messages ...bus.Message) error {
	if err := b.gate.err(); err != nil {
		return err
	}
	return b.Bus.Publish(ctx, messages...)
}

func (b gatedBus) PurgeWork(ctx context.Context, run string, before uint64) error {
	if err := b.gate.pass("PurgeWork"); err != nil {
		return err
	}
	return b.Bus.PurgeWork(ctx, run, before)
}

type gatedBuffer struct {
	scheduler.Buffer
	gate *gate
}

func (b gatedBuffer) CloseLedger(ctx context.Context, in *bufferv1.CloseLedgerRequest, o ...grpc.CallOption) (*bufferv1.CloseLedgerResponse, error) {
	if err := b.gate.pass("CloseLedger"); err != nil {
		return nil, err
	}
	return b.Buffer.CloseLedger(ctx, in, o...)
}

func (b gatedBuffer) ReissueGroups(ctx context.Context, in *bufferv1.ReissueGroupsRequest, o ...grpc.CallOption) (*bufferv1.ReissueGroupsResponse, error) {
	if err := b.gate.err(); err != nil {
		return nil, err
	}
	return b.Buffer.ReissueGroups(ctx, in, o...)
}

func (b gatedBuffer) ExcludeGroups(ctx context.Context, in *bufferv1.ExcludeGroupsRequest, o ...grpc.CallOption) (*bufferv1.ExcludeGroupsResponse, error) {
	if err := b.gate.err(); err != nil {
		return nil, err
	}
	return b.Buffer.ExcludeGroups(ctx, in, o...)
}

type gatedController struct {
	scheduler.Controller
	gate *gate
}

func (c gatedController) StopRun(ctx context.Context, in *learnerv1.StopRunRequest, o ...grpc.CallOption) (*learnerv1.StopRunResponse, error) {
	if err := c.gate.pass("StopRun"); err != nil {
		return nil, err
	}
	return c.Controller.StopRun(ctx, in, o...)
}
