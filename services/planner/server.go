package planner

import (
	"context"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
)

// ErrBaseDir reports a folder of a request that is not absolute.
var ErrBaseDir = rpcerr.New(codes.InvalidArgument, "BAD_BASE_DIR", "base_dir must be an absolute path")

// Register offers the service on a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) { planv1.RegisterPlannerServiceServer(r, s) }

// Run waits for ctx. A planner has no background work.
func (s *Server) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// ValidateConfig checks syntax, schema and rules.
func (s *Server) ValidateConfig(_ context.Context, request *planv1.ValidateConfigRequest) (*planv1.ValidateConfigResponse, error) {
	return validated(s.reader, request), nil
}

// Validate is ValidateConfig without a service.
func Validate(request *planv1.ValidateConfigRequest) (*planv1.ValidateConfigResponse, error) {
	reader, err := config.NewReader()
	if err != nil {
		return nil, err
	}
	return validated(reader, request), nil
}

func validated(reader *config.Reader, request *planv1.ValidateConfigRequest) *planv1.ValidateConfigResponse {
	reading := reader.Read(request.GetSource())
	response := &planv1.ValidateConfigResponse{Problems: reading.Sorted()}
	if reading.Problems.Empty() {
		response.Config = reading.Config
	}
	return response
}

// CreatePlan checks everything that can be known before the run and pins it.
func (s *Server) CreatePlan(ctx context.Context, request *planv1.CreatePlanRequest) (*planv1.CreatePlanResponse, error) {
	source := request.GetSource()
	if !filepath.IsAbs(source.GetBaseDir()) {
		return nil, ErrBaseDir.Field("source.base_dir", "give the absolute folder of the configuration file")
	}
	return s.create(ctx, request)
}

// RenewPlan plans the same configuration, with overrides, for the current inputs.
func (s *Server) RenewPlan(ctx context.Context, request *planv1.RenewPlanRequest) (*planv1.RenewPlanResponse, error) {
	if !filepath.IsAbs(request.GetBaseDir()) {
		return nil, ErrBaseDir.Field("base_dir", "give the absolute folder of the configuration file")
	}
	return s.renew(ctx, request.GetPlan(), request.GetBaseDir(), request.GetSet())
}

// VerifyPlan reads the inputs of a plan again and reports those that changed.
func (s *Server) VerifyPlan(ctx context.Context, request *planv1.VerifyPlanRequest) (*planv1.VerifyPlanResponse, error) {
	if !filepath.IsAbs(request.GetBaseDir()) {
		return nil, ErrBaseDir.Field("base_dir", "give the absolute folder of the configuration file")
	}
	return s.verify(ctx, request)
}
