package controller

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/disk"
	"github.com/rollout-rl/rollout/libs/worker"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Config configures the service.
type Config struct {
	// LeaseWait is how long the buffer may wait for missing groups before it reports what it waits
	// for. 0: 2 s.
	LeaseWait time.Duration
	// Retry is the pause before the first repetition of a call that got no answer. It doubles up to
	// 20 times this. 0: 100 ms.
	Retry time.Duration
	// Samples is how many samples of an evaluation go into its event. 0: 16.
	Samples int
	// DiskPause is how long a run waits before it looks again whether a full disk has space. 0: 500
	// ms.
	DiskPause time.Duration
	// DrainGrace is how long a run that is asked to stop waits for an evaluation in progress. 0: 5
	// seconds.
	DrainGrace time.Duration
}

func (c *Config) defaults() {
	if c.LeaseWait <= 0 {
		c.LeaseWait = 2 * time.Second
	}
	if c.Retry <= 0 {
		c.Retry = 100 * time.Millisecond
	}
	if c.Samples <= 0 {
		c.Samples = 16
	}
	if c.DrainGrace <= 0 {
		c.DrainGrace = 5 * time.Second
	}
	if c.DiskPause <= 0 {
		c.DiskPause = 500 * time.Millisecond
	}
}

// Buffer is the part of the buffer service that the controller calls.
type Buffer interface {
	RecordWeights(ctx context.Context, in *bufferv1.RecordWeightsRequest, opts ...grpc.CallOption) (*bufferv1.RecordWeightsResponse, error)
	LeaseBatch(ctx context.Context, in *bufferv1.LeaseBatchRequest, opts ...grpc.CallOption) (*bufferv1.LeaseBatchResponse, error)
	CommitStep(ctx context.Context, in *bufferv1.CommitStepRequest, opts ...grpc.CallOption) (*bufferv1.CommitStepResponse, error)
	GetBatch(ctx context.Context, in *bufferv1.GetBatchRequest, opts ...grpc.CallOption) (*bufferv1.GetBatchResponse, error)
	ListSteps(ctx context.Context, in *bufferv1.ListStepsRequest, opts ...grpc.CallOption) (*bufferv1.ListStepsResponse, error)
	TrimPayloads(ctx context.Context, in *bufferv1.TrimPayloadsRequest, opts ...grpc.CallOption) (*bufferv1.TrimPayloadsResponse, error)
}

// Snapshots is the part of the snapshot service that the controller calls.
type Snapshots interface {
	CreateSnapshot(ctx context.Context, in *snapshotv1.CreateSnapshotRequest, opts ...grpc.CallOption) (*snapshotv1.CreateSnapshotResponse, error)
	GetSnapshot(ctx context.Context, in *snapshotv1.GetSnapshotRequest, opts ...grpc.CallOption) (*snapshotv1.GetSnapshotResponse, error)
	ListSnapshots(ctx context.Context, in *snapshotv1.ListSnapshotsRequest, opts ...grpc.CallOption) (*snapshotv1.ListSnapshotsResponse, error)
	MaterializeSnapshot(ctx context.Context, in *snapshotv1.MaterializeSnapshotRequest, opts ...grpc.CallOption) (*snapshotv1.MaterializeSnapshotResponse, error)
	PinSnapshot(ctx context.Context, in *snapshotv1.PinSnapshotRequest, opts ...grpc.CallOption) (*snapshotv1.PinSnapshotResponse, error)
}

// Scheduler owns runs and their worker processes.
type Scheduler interface {
	VerifyWorkers(ctx context.Context, in *runv1.VerifyWorkersRequest, opts ...grpc.CallOption) (*runv1.VerifyWorkersResponse, error)
	CompleteRun(ctx context.Context, in *runv1.CompleteRunRequest, opts ...grpc.CallOption) (*runv1.CompleteRunResponse, error)
}

// Conn is a connection to a worker.
type Conn interface {
	grpc.ClientConnInterface
	io.Closer
}

// Events publishes events.
type Events interface {
	// Emit does not block.
	Emit(e *eventv1.Event)
	// Flush returns when the emitted events are on the bus.
	Flush(ctx context.Context) error
}

// Deps are the dependencies of the service.
type Deps struct {
	Store     Store
	Buffer    Buffer
	Snapshots Snapshots
	Scheduler Scheduler
	Epoch     uint64 // of the lease of this controller
	Registry  worker.Registry
	// Dial connects to a worker of a run at host:port; calls carry the token that its workers accept.
	Dial   func(run string, incarnation uint32, address string) (Conn, error)
	Events Events
	Disk   func(dir string) Disk // of a run's folder; nil: disk.NewReserve with its default
	Log    *slog.Logger          // nil discards
	Now    func() time.Time      // nil: time.Now
}

func (d *Deps) check() error {
	var errs []error
	for name, missing := range map[string]bool{
		"store": d.Store == nil, "buffer": d.Buffer == nil, "snapshot service": d.Snapshots == nil, "scheduler": d.Scheduler == nil,
		"registry": d.Registry == nil, "dialer of workers": d.Dial == nil, "event publisher": d.Events == nil,
	} {
		if missing {
			errs = append(errs, errors.New("controller: missing dependency: "+name))
		}
	}
	if d.Disk == nil {
		d.Disk = func(dir string) Disk { return disk.NewReserve(dir, 0) }
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	return errors.Join(errs...)
}
