package snapshot

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/checkpoint"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Config configures the service. Retention comes with each request.
type Config struct {
	// PageSize is how many manifests a list returns if the request has no page size. 0: 100.
	PageSize int
}

// Artifacts is the part of the storage service that this service calls.
type Artifacts interface {
	ImportArtifacts(ctx context.Context, in *storagev1.ImportArtifactsRequest, opts ...grpc.CallOption) (*storagev1.ImportArtifactsResponse, error)
	ExportArtifacts(ctx context.Context, in *storagev1.ExportArtifactsRequest, opts ...grpc.CallOption) (*storagev1.ExportArtifactsResponse, error)
	DeleteArtifacts(ctx context.Context, in *storagev1.DeleteArtifactsRequest, opts ...grpc.CallOption) (*storagev1.DeleteArtifactsResponse, error)
	GetArtifact(ctx context.Context, in *storagev1.GetArtifactRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[storagev1.GetArtifactResponse], error)
}

// Ledgers is the part of the buffer service that this service calls.
type Ledgers interface {
	CutLedger(ctx context.Context, in *bufferv1.CutLedgerRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[bufferv1.CutLedgerResponse], error)
}

// Controller is the part of the learner controller that this service calls.
type Controller interface {
	CutRun(ctx context.Context, in *learnerv1.CutRunRequest, opts ...grpc.CallOption) (*learnerv1.CutRunResponse, error)
}

// Processes saves the processes of the environments of a run that are on this host.
type Processes interface {
	// Of returns the ids of those of a run.
	Of(run string) ([]int, error)
	// Dump is that of checkpoint.Checkpointer.
	Dump(ctx context.Context, pid int, dir string, keep bool) (checkpoint.Image, error)
}

// Scheduler is the part of the scheduler that this service calls.
type Scheduler interface {
	GetRun(ctx context.Context, in *runv1.GetRunRequest, opts ...grpc.CallOption) (*runv1.GetRunResponse, error)
	CreateRun(ctx context.Context, in *runv1.CreateRunRequest, opts ...grpc.CallOption) (*runv1.CreateRunResponse, error)
}

// Events publishes events.
type Events interface {
	// Emit does not block.
	Emit(e *eventv1.Event)
}

// Deps are the dependencies of the service.
type Deps struct {
	Store     Store
	Artifacts Artifacts
	Scheduler Scheduler
	Buffer    Ledgers
	// Controller ends the step that a run makes before snapshots are taken.
	Controller Controller
	Processes  Processes
	// Bucket is where the manifests are next to the artifacts; nil: artifacts are files of this
	// control plane, and share the fate of its databases.
	Bucket   blob.Store
	Events   Events
	Projects *apikey.Projects // nil: keys see the snapshots of all projects
	Log      *slog.Logger     // nil discards
	Now      func() time.Time // nil: time.Now
	Epoch    uint64           // of the lease of this service
}

func (d *Deps) check() error {
	var errs []error
	if d.Store == nil {
		errs = append(errs, errors.New("snapshot: missing dependency: store"))
	}
	if d.Artifacts == nil {
		errs = append(errs, errors.New("snapshot: missing dependency: artifact service"))
	}
	if d.Scheduler == nil {
		errs = append(errs, errors.New("snapshot: missing dependency: scheduler"))
	}
	if d.Buffer == nil {
		errs = append(errs, errors.New("snapshot: missing dependency: buffer"))
	}
	if d.Controller == nil {
		errs = append(errs, errors.New("snapshot: missing dependency: learner controller"))
	}
	if d.Processes == nil {
		errs = append(errs, errors.New("snapshot: missing dependency: processes"))
	}
	if d.Events == nil {
		errs = append(errs, errors.New("snapshot: missing dependency: event publisher"))
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	return errors.Join(errs...)
}
