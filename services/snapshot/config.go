package snapshot

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Config sets the service. Retention comes with each request, so only paging is left.
type Config struct {
	// PageSize is how many manifests a list returns that asks for no number. 0: 100.
	PageSize int
}

// Artifacts is what the service needs of storage.
type Artifacts interface {
	ImportArtifacts(ctx context.Context, in *storagev1.ImportArtifactsRequest, opts ...grpc.CallOption) (*storagev1.ImportArtifactsResponse, error)
	ExportArtifacts(ctx context.Context, in *storagev1.ExportArtifactsRequest, opts ...grpc.CallOption) (*storagev1.ExportArtifactsResponse, error)
	DeleteArtifacts(ctx context.Context, in *storagev1.DeleteArtifactsRequest, opts ...grpc.CallOption) (*storagev1.DeleteArtifactsResponse, error)
}

// Scheduler is what the service needs of the scheduler.
type Scheduler interface {
	GetRun(ctx context.Context, in *runv1.GetRunRequest, opts ...grpc.CallOption) (*runv1.GetRunResponse, error)
	CreateRun(ctx context.Context, in *runv1.CreateRunRequest, opts ...grpc.CallOption) (*runv1.CreateRunResponse, error)
}

// Events takes events without blocking.
type Events interface {
	Emit(e *eventv1.Event)
}

// Deps are the service's surroundings.
type Deps struct {
	Store     Store
	Artifacts Artifacts
	Scheduler Scheduler
	Events    Events
	Log       *slog.Logger     // nil discards
	Now       func() time.Time // nil: time.Now
}

func (d *Deps) check() error {
	var errs []error
	if d.Store == nil {
		errs = append(errs, errors.New("snapshot: no store"))
	}
	if d.Artifacts == nil {
		errs = append(errs, errors.New("snapshot: no artifact service"))
	}
	if d.Scheduler == nil {
		errs = append(errs, errors.New("snapshot: no scheduler"))
	}
	if d.Events == nil {
		errs = append(errs, errors.New("snapshot: nobody takes events"))
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	return errors.Join(errs...)
}
