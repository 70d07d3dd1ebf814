package scheduler

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"runtime"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/discovery"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// Config sets the scheduler.
type Config struct {
	// StateDir is the state folder; a run lives in StateDir/runs/<run>.
	StateDir string
	// ResumeOnStart resumes the runs that were active when the service last died. Off, they wait for ResumeRun: a daemon that
	// starts because somebody asks for something else should not begin to train.
	ResumeOnStart bool
	// Worker says how worker processes are started.
	Worker WorkerConfig
}

// WorkerConfig is what every worker of this host is started with. Tokens are references, "file:PATH" or "env:NAME": what is written
// for a worker holds no secret.
type WorkerConfig struct {
	Command       []string // program and arguments before the kind, e.g. [".venv/bin/rollout-worker"]
	Env           []string // environment, KEY=value
	BusEnv        []string // more of it, for those that connect to NATS
	NATSURL       string
	NATSToken     string
	NATS          *runv1.NatsAccess // other credentials, and TLS; nil for none
	ConsulAddress string            // host:port, or an URL
	ConsulToken   string
	Consul        cert.Files       // of an agent at https://
	Token         string           // of the mesh
	TLS           *runv1.WorkerTls // of the mesh; nil: plain text
	OTLPEndpoint  string
	Cores         int // cores that runs may use; 0: all of this host
	Limits        launch.Limits
}

// The rest are the few methods that the scheduler uses of others; generated clients and the libraries satisfy them.

// Planner verifies plans.
type Planner interface {
	VerifyPlan(ctx context.Context, in *planv1.VerifyPlanRequest, opts ...grpc.CallOption) (*planv1.VerifyPlanResponse, error)
}

// Buffer is the ledger.
type Buffer interface {
	OpenLedger(ctx context.Context, in *bufferv1.OpenLedgerRequest, opts ...grpc.CallOption) (*bufferv1.OpenLedgerResponse, error)
	CloseLedger(ctx context.Context, in *bufferv1.CloseLedgerRequest, opts ...grpc.CallOption) (*bufferv1.CloseLedgerResponse, error)
	WatchLedger(ctx context.Context, in *bufferv1.WatchLedgerRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[bufferv1.WatchLedgerResponse], error)
	ListSteps(ctx context.Context, in *bufferv1.ListStepsRequest, opts ...grpc.CallOption) (*bufferv1.ListStepsResponse, error)
	ListGroups(ctx context.Context, in *bufferv1.ListGroupsRequest, opts ...grpc.CallOption) (*bufferv1.ListGroupsResponse, error)
	ExcludeGroups(ctx context.Context, in *bufferv1.ExcludeGroupsRequest, opts ...grpc.CallOption) (*bufferv1.ExcludeGroupsResponse, error)
	ReissueGroups(ctx context.Context, in *bufferv1.ReissueGroupsRequest, opts ...grpc.CallOption) (*bufferv1.ReissueGroupsResponse, error)
}

// Controller drives the learner.
type Controller interface {
	StartRun(ctx context.Context, in *learnerv1.StartRunRequest, opts ...grpc.CallOption) (*learnerv1.StartRunResponse, error)
	StopRun(ctx context.Context, in *learnerv1.StopRunRequest, opts ...grpc.CallOption) (*learnerv1.StopRunResponse, error)
	GetProgress(ctx context.Context, in *learnerv1.GetProgressRequest, opts ...grpc.CallOption) (*learnerv1.GetProgressResponse, error)
	WatchProgress(ctx context.Context, in *learnerv1.WatchProgressRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[learnerv1.WatchProgressResponse], error)
}

// Snapshots finds the snapshot that a run starts from, and keeps it.
type Snapshots interface {
	GetSnapshot(ctx context.Context, in *snapshotv1.GetSnapshotRequest, opts ...grpc.CallOption) (*snapshotv1.GetSnapshotResponse, error)
	PinSnapshot(ctx context.Context, in *snapshotv1.PinSnapshotRequest, opts ...grpc.CallOption) (*snapshotv1.PinSnapshotResponse, error)
}

// Bus is the streams. *bus.Bus satisfies it.
type Bus interface {
	EnsureRun(ctx context.Context, run string) error
	DeleteRun(ctx context.Context, run string) error
	Runs(ctx context.Context) ([]string, error)
	WorkMark(ctx context.Context, run string) (uint64, error)
	PurgeWork(ctx context.Context, run string, before uint64) error
	Publish(ctx context.Context, messages ...bus.Message) error
	// EventsStored returns when the storage service has every event that is on the bus.
	EventsStored(ctx context.Context) error
	// Healthy reports whether the connection is up.
	Healthy() bool
}

// Registry tells which workers serve. *discovery.Client satisfies it.
type Registry interface {
	Watch(ctx context.Context, service string) <-chan []discovery.Instance
}

// Conn is a connection to a worker.
type Conn interface {
	grpc.ClientConnInterface
	Close() error
}

// Events takes events without blocking.
type Events interface {
	Emit(e *eventv1.Event)
	// Flush returns when what was emitted is on the bus.
	Flush(ctx context.Context) error
}

// Deps are the scheduler's surroundings.
type Deps struct {
	Store      Store
	Planner    Planner
	Buffer     Buffer
	Controller Controller
	Snapshots  Snapshots
	Bus        Bus
	Registry   Registry
	Launcher   launch.Launcher
	Dial       func(address string) (Conn, error) // of a worker, host:port
	Events     Events
	Log        *slog.Logger     // nil discards
	Now        func() time.Time // nil: time.Now
}

func (c *Config) check() error {
	var errs []error
	if !filepath.IsAbs(c.StateDir) {
		errs = append(errs, errors.New("scheduler: the state folder must be absolute"))
	}
	if len(c.Worker.Command) == 0 {
		errs = append(errs, errors.New("scheduler: no worker command"))
	}
	if c.Worker.Cores <= 0 {
		c.Worker.Cores = runtime.NumCPU()
	}
	return errors.Join(errs...)
}

func (d *Deps) check() error {
	var errs []error
	for _, p := range []struct {
		name    string
		missing bool
	}{
		{"store", d.Store == nil}, {"planner", d.Planner == nil}, {"buffer", d.Buffer == nil}, {"controller", d.Controller == nil},
		{"snapshots", d.Snapshots == nil}, {"bus", d.Bus == nil}, {"registry", d.Registry == nil}, {"launcher", d.Launcher == nil},
		{"dial", d.Dial == nil}, {"events", d.Events == nil},
	} {
		if p.missing {
			errs = append(errs, errors.New("scheduler: no "+p.name))
		}
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	return errors.Join(errs...)
}
