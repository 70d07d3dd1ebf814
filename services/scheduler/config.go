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
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// Config configures the scheduler.
type Config struct {
	// StateDir is the state folder; a run has the folder StateDir/runs/<run>.
	StateDir string
	// ResumeOnStart resumes the runs that were active when the service died. If it is off, they wait
	// for ResumeRun: a local daemon that starts for another command should not begin to train.
	ResumeOnStart bool
	// Replicas: another scheduler takes over when this one stops, and adopts its workers.
	Replicas bool
	// Retention is after which time runs are deleted, by the state in which they ended. A state that
	// is absent: never.
	Retention map[State]time.Duration
	// KeepRuns is how many of the newest runs that have ended stay; older ones are deleted. 0: all.
	KeepRuns int
	// Worker configures worker processes.
	Worker WorkerConfig
}

// OwnCredential stands for the credential of the worker itself in NATSToken and ConsulToken: the
// embedded servers accept it.
const OwnCredential = "own"

// WorkerConfig is the configuration of every worker process. Tokens are references, "file:PATH" or
// "env:NAME", so that specs on disk have no credentials of others.
type WorkerConfig struct {
	Command       []string             // program and arguments before the kind, e.g. [".venv/bin/rollout-worker"]
	Env           []string             // environment, KEY=value
	Elsewhere     map[string]Elsewhere // the kinds of workers that run on other hosts
	BusEnv        []string             // additional environment of workers that connect to NATS
	NATSURL       string
	NATSToken     string
	NATS          *runv1.NatsAccess // other credentials, and TLS; may be nil
	ConsulAddress string            // host:port or URL
	ConsulToken   string
	Consul        cert.Files // TLS of an agent at https://
	// Issue returns the credential of a worker.
	Issue func(credential.Claims) string
	// ServicesKey is the public key of the registrations of services.
	ServicesKey  string
	TLS          *runv1.WorkerTls // of the services and workers; nil: plain text
	OTLPEndpoint string
	Cores        int // cores that runs may use; 0: all cores of this host
	Limits       launch.Limits
}

// Elsewhere describes the hosts of the workers of a kind.
type Elsewhere struct {
	OwnEnv bool // workers have the environment of their host, and not WorkerConfig.Env
	Cores  int  // of one worker; 0: not known
}

// The following interfaces are what the scheduler uses of its surroundings. Generated clients and
// the libraries implement them.

// Planner verifies plans.
type Planner interface {
	VerifyPlan(ctx context.Context, in *planv1.VerifyPlanRequest, opts ...grpc.CallOption) (*planv1.VerifyPlanResponse, error)
}

// Buffer is the ledger.
type Buffer interface {
	OpenLedger(ctx context.Context, in *bufferv1.OpenLedgerRequest, opts ...grpc.CallOption) (*bufferv1.OpenLedgerResponse, error)
	CloseLedger(ctx context.Context, in *bufferv1.CloseLedgerRequest, opts ...grpc.CallOption) (*bufferv1.CloseLedgerResponse, error)
	WatchLedger(ctx context.Context, in *bufferv1.WatchLedgerRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[bufferv1.WatchLedgerResponse], error)
	ListIncompleteGroups(ctx context.Context, in *bufferv1.ListIncompleteGroupsRequest, opts ...grpc.CallOption) (*bufferv1.ListIncompleteGroupsResponse, error)
	ExcludeGroups(ctx context.Context, in *bufferv1.ExcludeGroupsRequest, opts ...grpc.CallOption) (*bufferv1.ExcludeGroupsResponse, error)
	ReissueGroups(ctx context.Context, in *bufferv1.ReissueGroupsRequest, opts ...grpc.CallOption) (*bufferv1.ReissueGroupsResponse, error)
	DeleteRun(ctx context.Context, in *bufferv1.DeleteRunRequest, opts ...grpc.CallOption) (*bufferv1.DeleteRunResponse, error)
}

// Controller drives the learner.
type Controller interface {
	StartRun(ctx context.Context, in *learnerv1.StartRunRequest, opts ...grpc.CallOption) (*learnerv1.StartRunResponse, error)
	StopRun(ctx context.Context, in *learnerv1.StopRunRequest, opts ...grpc.CallOption) (*learnerv1.StopRunResponse, error)
	GetProgress(ctx context.Context, in *learnerv1.GetProgressRequest, opts ...grpc.CallOption) (*learnerv1.GetProgressResponse, error)
	WatchProgress(ctx context.Context, in *learnerv1.WatchProgressRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[learnerv1.WatchProgressResponse], error)
	DeleteRun(ctx context.Context, in *learnerv1.DeleteRunRequest, opts ...grpc.CallOption) (*learnerv1.DeleteRunResponse, error)
}

// Sessions is the gateway: it deletes the sessions of a run, and lists what they wait for.
type Sessions interface {
	ListWaits(ctx context.Context, in *gatewayv1.ListWaitsRequest, opts ...grpc.CallOption) (*gatewayv1.ListWaitsResponse, error)
	DeleteRun(ctx context.Context, in *gatewayv1.DeleteRunRequest, opts ...grpc.CallOption) (*gatewayv1.DeleteRunResponse, error)
}

// Log deletes the events, metrics, and artifacts of a run.
type Log interface {
	DeleteRun(ctx context.Context, in *storagev1.DeleteRunRequest, opts ...grpc.CallOption) (*storagev1.DeleteRunResponse, error)
}

// Snapshots finds and pins the snapshot that a run starts from, and deletes those of a run.
type Snapshots interface {
	UnpinSnapshot(ctx context.Context, in *snapshotv1.UnpinSnapshotRequest, opts ...grpc.CallOption) (*snapshotv1.UnpinSnapshotResponse, error)
	DeleteSnapshot(ctx context.Context, in *snapshotv1.DeleteSnapshotRequest, opts ...grpc.CallOption) (*snapshotv1.DeleteSnapshotResponse, error)
	DeleteRun(ctx context.Context, in *snapshotv1.DeleteRunRequest, opts ...grpc.CallOption) (*snapshotv1.DeleteRunResponse, error)
	ListSnapshots(ctx context.Context, in *snapshotv1.ListSnapshotsRequest, opts ...grpc.CallOption) (*snapshotv1.ListSnapshotsResponse, error)
	GetSnapshot(ctx context.Context, in *snapshotv1.GetSnapshotRequest, opts ...grpc.CallOption) (*snapshotv1.GetSnapshotResponse, error)
	PinSnapshot(ctx context.Context, in *snapshotv1.PinSnapshotRequest, opts ...grpc.CallOption) (*snapshotv1.PinSnapshotResponse, error)
	AdoptEpisodes(ctx context.Context, in *snapshotv1.AdoptEpisodesRequest, opts ...grpc.CallOption) (*snapshotv1.AdoptEpisodesResponse, error)
}

// Bus is the NATS streams. *bus.Bus implements it.
type Bus interface {
	EnsureRun(ctx context.Context, run string) error
	DeleteRun(ctx context.Context, run string) error
	Runs(ctx context.Context) ([]string, error)
	WorkMark(ctx context.Context, run string) (uint64, error)
	// InspectRun lists the work and the missing streams of a run.
	InspectRun(ctx context.Context, run string) (*bus.RunState, error)
	PurgeWork(ctx context.Context, run string, before uint64) error
	Publish(ctx context.Context, messages ...bus.Message) error
	// EventsStored returns when the storage service has stored every event on the bus.
	EventsStored(ctx context.Context) error
	// Healthy reports whether the connection is up.
	Healthy() bool
	// Servers are the addresses that it connects to.
	Servers() []string
}

// Registry lists the registered workers. *discovery.Client implements it.
type Registry interface {
	Watch(ctx context.Context, service string) <-chan []discovery.Instance
}

// Conn is a connection to a worker.
type Conn interface {
	grpc.ClientConnInterface
	Close() error
}

// Places are where workers run that an operator starts. *external.Pool implements it.
type Places interface {
	Join(stream runv1.PlaceService_JoinServer) error
	// Close sends all places away, when no worker runs in them.
	Close()
}

// Events sends events without blocking.
type Events interface {
	Emit(e *eventv1.Event)
	// Flush returns when all emitted events are on the bus.
	Flush(ctx context.Context) error
}

// Deps are the dependencies of the scheduler.
type Deps struct {
	Store      Store
	Planner    Planner
	Buffer     Buffer
	Controller Controller
	Snapshots  Snapshots
	Sessions   Sessions
	EventLog   Log
	Bus        Bus
	Registry   Registry
	Launcher   launch.Launcher
	Places     Places                                                             // for external workers; nil: no worker is external
	Dial       func(run string, incarnation uint32, address string) (Conn, error) // connects to a worker, host:port
	Events     Events
	Log        *slog.Logger     // nil discards
	Now        func() time.Time // nil: time.Now
	Epoch      uint64           // of the lease of this scheduler
	// Locks lists the services that wait for locks of the database; nil: none do.
	Locks func(ctx context.Context) ([]sqldb.Blocked, error)
}

// fence is what calls to other services carry, for an incarnation of a run; 0: for no run.
func (d *Deps) fence(incarnation uint32) *fencev1.Fence {
	return &fencev1.Fence{Incarnation: incarnation, Role: names.SchedulerService, LeaderEpoch: d.Epoch}
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
		{"snapshots", d.Snapshots == nil}, {"sessions", d.Sessions == nil}, {"event log", d.EventLog == nil}, {"bus", d.Bus == nil}, {"registry", d.Registry == nil}, {"launcher", d.Launcher == nil},
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
