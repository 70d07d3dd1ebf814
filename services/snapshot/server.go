package snapshot

import (
	"context"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/paging"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Server is the gRPC edge of the service.
type Server struct {
	snapshotv1.UnimplementedSnapshotServiceServer
	cfg Config
	svc *service
}

// New makes the service. It starts nothing.
func New(cfg Config, deps Deps) (*Server, error) {
	if err := deps.check(); err != nil {
		return nil, err
	}
	if cfg.PageSize <= 0 {
		cfg.PageSize = 100
	}
	return &Server{cfg: cfg, svc: &service{Deps: deps, handlers: newHandlers(deps)}}, nil
}

// Register adds the service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) { snapshotv1.RegisterSnapshotServiceServer(r, s) }

// Run deletes the artifacts that a crash left without a manifest, then waits for ctx to end.
func (s *Server) Run(ctx context.Context) error {
	delay := 100 * time.Millisecond
	for {
		err := s.svc.sweep(ctx)
		if err == nil || ctx.Err() != nil {
			break
		}
		s.svc.Log.WarnContext(ctx, "deleting the artifacts without a manifest failed and is repeated", "error", err, "after", delay)
		select {
		case <-ctx.Done():
		case <-time.After(delay):
			delay = min(2*delay, time.Minute)
		}
	}
	<-ctx.Done()
	return nil
}

// CreateSnapshot implements the contract.
func (s *Server) CreateSnapshot(ctx context.Context, req *snapshotv1.CreateSnapshotRequest) (*snapshotv1.CreateSnapshotResponse, error) {
	snap, err := s.svc.create(ctx, req)
	if err != nil {
		return nil, err
	}
	return &snapshotv1.CreateSnapshotResponse{Snapshot: snap}, nil
}

// TakeSnapshots implements the contract.
func (s *Server) TakeSnapshots(ctx context.Context, req *snapshotv1.TakeSnapshotsRequest) (*snapshotv1.TakeSnapshotsResponse, error) {
	made, err := s.svc.take(ctx, req.GetRunId(), req.GetKinds(), req.GetName())
	if err != nil {
		return nil, err
	}
	return &snapshotv1.TakeSnapshotsResponse{Snapshots: made}, nil
}

// VerifySnapshot implements the contract.
func (s *Server) VerifySnapshot(ctx context.Context, req *snapshotv1.VerifySnapshotRequest) (*snapshotv1.VerifySnapshotResponse, error) {
	snap, flaws, err := s.svc.verify(ctx, req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	return &snapshotv1.VerifySnapshotResponse{Snapshot: snap, Flaws: flaws}, nil
}

// GetSnapshot implements the contract.
func (s *Server) GetSnapshot(ctx context.Context, req *snapshotv1.GetSnapshotRequest) (*snapshotv1.GetSnapshotResponse, error) {
	snap, err := s.svc.get(ctx, req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	return &snapshotv1.GetSnapshotResponse{Snapshot: snap}, nil
}

// ListSnapshots implements the contract.
func (s *Server) ListSnapshots(ctx context.Context, req *snapshotv1.ListSnapshotsRequest) (*snapshotv1.ListSnapshotsResponse, error) {
	if req.GetKind() != 0 {
		if _, err := s.svc.handlers.of(req.GetKind()); err != nil {
			return nil, err
		}
	}
	if after := req.GetPageToken(); after != "" {
		if made, ok := strings.CutPrefix(after, prefix); !ok || !id.Valid(made) {
			return nil, paging.ErrToken(after)
		}
	}
	size := paging.Size(req.GetPageSize(), s.cfg.PageSize)
	found, err := s.svc.list(ctx, Filter{Run: req.GetRunId(), Kind: req.GetKind(), After: req.GetPageToken(), Limit: size + 1, Pinned: req.GetPinned()})
	if err != nil {
		return nil, err
	}
	resp := &snapshotv1.ListSnapshotsResponse{}
	resp.Snapshots, resp.NextPageToken = paging.Cut(found, size, (*Snapshot).GetSnapshotId)
	return resp, nil
}

// MaterializeSnapshot implements the contract.
func (s *Server) MaterializeSnapshot(ctx context.Context, req *snapshotv1.MaterializeSnapshotRequest) (*snapshotv1.MaterializeSnapshotResponse, error) {
	snap, err := s.svc.materialize(ctx, req.GetSnapshotId(), req.GetDirectory(), req.GetPaths())
	if err != nil {
		return nil, err
	}
	return &snapshotv1.MaterializeSnapshotResponse{Snapshot: snap}, nil
}

// PinSnapshot implements the contract.
func (s *Server) PinSnapshot(ctx context.Context, req *snapshotv1.PinSnapshotRequest) (*snapshotv1.PinSnapshotResponse, error) {
	snap, err := s.svc.pin(ctx, req.GetSnapshotId(), req.GetFence())
	if err != nil {
		return nil, err
	}
	return &snapshotv1.PinSnapshotResponse{Snapshot: snap}, nil
}

// UnpinSnapshot implements the contract.
func (s *Server) UnpinSnapshot(ctx context.Context, req *snapshotv1.UnpinSnapshotRequest) (*snapshotv1.UnpinSnapshotResponse, error) {
	if err := s.svc.Store.Unpin(ctx, req.GetSnapshotId(), req.GetFence()); err != nil {
		return nil, err
	}
	return &snapshotv1.UnpinSnapshotResponse{}, nil
}

// RecoverSnapshots implements the contract.
func (s *Server) RecoverSnapshots(ctx context.Context, req *snapshotv1.RecoverSnapshotsRequest) (*snapshotv1.RecoverSnapshotsResponse, error) {
	size := paging.Size(req.GetPageSize(), s.cfg.PageSize)
	found, next, err := s.svc.recover(ctx, req.GetRunId(), req.GetBaseDir(), req.GetPageToken(), size)
	if err != nil {
		return nil, err
	}
	return &snapshotv1.RecoverSnapshotsResponse{Snapshots: found, NextPageToken: next}, nil
}

// DeleteRun implements the contract.
func (s *Server) DeleteRun(ctx context.Context, req *snapshotv1.DeleteRunRequest) (*snapshotv1.DeleteRunResponse, error) {
	kept, err := s.svc.deleteRun(ctx, req.GetRunId(), req.GetKeep(), req.GetFence())
	if err != nil {
		return nil, err
	}
	return &snapshotv1.DeleteRunResponse{Kept: kept}, nil
}

// RestoreSnapshot implements the contract.
func (s *Server) RestoreSnapshot(ctx context.Context, req *snapshotv1.RestoreSnapshotRequest) (*snapshotv1.RestoreSnapshotResponse, error) {
	run, err := s.svc.restore(ctx, req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	return &snapshotv1.RestoreSnapshotResponse{Run: run}, nil
}

// DeleteSnapshot implements the contract. It takes only complete ids, so that no prefix deletes a
// snapshot by accident.
func (s *Server) DeleteSnapshot(ctx context.Context, req *snapshotv1.DeleteSnapshotRequest) (*snapshotv1.DeleteSnapshotResponse, error) {
	if err := s.svc.Store.Admit(ctx, "", req.GetFence()); err != nil {
		return nil, err
	}
	if err := s.svc.removable(ctx, req.GetSnapshotId()); err != nil {
		return nil, err
	}
	if _, err := s.svc.get(ctx, req.GetSnapshotId()); errors.Is(err, ErrNotFound) {
		return &snapshotv1.DeleteSnapshotResponse{}, nil // as after a deletion, also if the caller does not see it
	}
	if err := s.svc.remove(ctx, req.GetFence(), req.GetSnapshotId()); err != nil {
		return nil, err
	}
	return &snapshotv1.DeleteSnapshotResponse{}, nil
}

var _ snapshotv1.SnapshotServiceServer = (*Server)(nil)
