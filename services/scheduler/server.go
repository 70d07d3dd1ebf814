package scheduler

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Server is the gRPC edge of the scheduler: one service for people and their tools, one for the other services.
type Server struct {
	runv1.UnimplementedSchedulerServiceServer
	svc      *service
	left     []string // runs that a dead process left active
	caughtUp chan struct{}
}

// New makes the scheduler. Runs that a dead process left active are INTERRUPTED from now on, so that whoever asks later sees what is;
// with Config.ResumeOnStart Run goes on with them. It starts nothing.
func New(cfg Config, deps Deps) (*Server, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := deps.check(); err != nil {
		return nil, err
	}
	ctx := context.Background()
	if err := checkFormats(ctx, deps.Store); err != nil {
		return nil, err
	}
	s := &Server{svc: newService(cfg, deps), caughtUp: make(chan struct{})}
	var err error
	s.left, err = s.svc.left(ctx)
	return s, err
}

// Register adds both services to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	runv1.RegisterSchedulerServiceServer(r, s)
	runv1.RegisterSchedulerInternalServiceServer(r, internalServer{svc: s.svc})
}

// Run conducts runs until ctx ends. When it returns their workers are stopped, and their records say that they are interrupted, or
// still paused where a refused gradient had paused them;
// with Config.ResumeOnStart the records stay as they are, and the next scheduler goes on.
func (s *Server) Run(ctx context.Context) error {
	s.svc.catchUp(ctx, s.left)
	close(s.caughtUp)
	s.svc.wg.Go(func() {
		if err := s.svc.retell(ctx); err != nil && ctx.Err() == nil {
			s.svc.Log.WarnContext(ctx, "the events of runs may lack an end", "error", err)
		}
		s.svc.sweep(ctx)
	})
	if s.svc.cfg.ResumeOnStart {
		var wg sync.WaitGroup
		defer wg.Wait()
		for _, id := range s.left {
			wg.Go(func() { s.svc.adopt(ctx, id) })
		}
	}
	<-ctx.Done()
	s.svc.shutdown()
	return nil
}

// current waits a moment for the records of the runs that a dead process left behind: their ledgers know more than they do.
func (s *Server) current(ctx context.Context) {
	if len(s.left) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, catchUpPatience)
	defer cancel()
	select {
	case <-s.caughtUp:
	case <-ctx.Done():
	}
}

// CreateRun implements the contract.
func (s *Server) CreateRun(ctx context.Context, req *runv1.CreateRunRequest) (*runv1.CreateRunResponse, error) {
	run, err := s.svc.create(ctx, req)
	if err != nil {
		return nil, err
	}
	return &runv1.CreateRunResponse{Run: run}, nil
}

// GetRun implements the contract.
func (s *Server) GetRun(ctx context.Context, req *runv1.GetRunRequest) (*runv1.GetRunResponse, error) {
	s.current(ctx)
	run, err := s.svc.Store.Resolve(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	status, err := s.svc.status(ctx, run, true)
	if err != nil {
		return nil, err
	}
	return &runv1.GetRunResponse{Status: status}, nil
}

// ListRuns implements the contract. Steps of active runs are those of this moment.
func (s *Server) ListRuns(ctx context.Context, req *runv1.ListRunsRequest) (*runv1.ListRunsResponse, error) {
	if after := req.GetPageToken(); after != "" && !id.ValidRun(after) {
		return nil, rpcerr.New(codes.InvalidArgument, rpcerr.ReasonInvalidRequest, "the page token %q is none; send the next_page_token of the page before, or nothing", after).
			Field("page_token", "must be a next_page_token")
	}
	s.current(ctx)
	size := int(req.GetPageSize())
	if size == 0 {
		size = 100
	}
	runs, err := s.svc.Store.List(ctx, Filter{States: req.GetStates(), After: req.GetPageToken(), Limit: size + 1})
	if err != nil {
		return nil, err
	}
	resp := &runv1.ListRunsResponse{}
	if len(runs) > size {
		runs = runs[:size]
		resp.NextPageToken = runs[size-1].GetRunId()
	}
	for _, run := range runs {
		if c := s.svc.conductor(run.GetRunId()); c != nil {
			advance(run, c.progress())
		}
		resp.Runs = append(resp.Runs, run)
	}
	return resp, nil
}

// CancelRun implements the contract.
func (s *Server) CancelRun(ctx context.Context, req *runv1.CancelRunRequest) (*runv1.CancelRunResponse, error) {
	id, err := s.resolve(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	run, err := s.svc.cancel(ctx, id, req.GetDrain())
	if err != nil {
		return nil, err
	}
	return &runv1.CancelRunResponse{Run: run}, nil
}

// PauseRun implements the contract.
func (s *Server) PauseRun(ctx context.Context, req *runv1.PauseRunRequest) (*runv1.PauseRunResponse, error) {
	id, err := s.resolve(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	run, err := s.svc.pause(ctx, id)
	if err != nil {
		return nil, err
	}
	return &runv1.PauseRunResponse{Run: run}, nil
}

// ResumeRun implements the contract.
func (s *Server) ResumeRun(ctx context.Context, req *runv1.ResumeRunRequest) (*runv1.ResumeRunResponse, error) {
	id, err := s.resolve(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	run, err := s.svc.resume(ctx, id)
	if err != nil {
		return nil, err
	}
	return &runv1.ResumeRunResponse{Run: run}, nil
}

// WatchRun implements the contract. It ends when the run has ended, and with ErrStopping when this service goes.
func (s *Server) WatchRun(req *runv1.WatchRunRequest, stream grpc.ServerStreamingServer[runv1.WatchRunResponse]) error {
	id, err := s.resolve(stream.Context(), req.GetRunId())
	if err != nil {
		return err
	}
	return s.svc.watch(stream.Context(), id, func(status *runv1.RunStatus) error {
		return stream.Send(&runv1.WatchRunResponse{Status: status})
	})
}

// resolve takes what GetRun takes: an id, a unique prefix or a name.
func (s *Server) resolve(ctx context.Context, ref string) (string, error) {
	run, err := s.svc.Store.Resolve(ctx, ref)
	return run.GetRunId(), err
}

type internalServer struct {
	runv1.UnimplementedSchedulerInternalServiceServer
	svc *service
}

// CompleteRun implements the contract.
func (s internalServer) CompleteRun(ctx context.Context, req *runv1.CompleteRunRequest) (*runv1.CompleteRunResponse, error) {
	if err := s.svc.complete(ctx, req); err != nil {
		return nil, err
	}
	return &runv1.CompleteRunResponse{}, nil
}

// VerifyWorkers implements the contract.
func (s internalServer) VerifyWorkers(_ context.Context, req *runv1.VerifyWorkersRequest) (*runv1.VerifyWorkersResponse, error) {
	if c := s.svc.conductor(req.GetRunId()); c != nil && c.incarnation == req.GetIncarnation() {
		return &runv1.VerifyWorkersResponse{Accepted: c.verifyWorkers(req.GetWorkers())}, nil
	}
	return &runv1.VerifyWorkersResponse{Accepted: make([]bool, len(req.GetWorkers()))}, nil
}

// GetCursor implements the contract.
func (s internalServer) GetCursor(ctx context.Context, req *runv1.GetCursorRequest) (*runv1.GetCursorResponse, error) {
	run, err := s.svc.Store.Get(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	cursor, err := s.svc.Store.Cursor(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	data, err := trainData(run)
	if err != nil {
		return nil, err
	}
	return &runv1.GetCursorResponse{Cursor: cursorMessage(cursor.Position, data.rows)}, nil
}
