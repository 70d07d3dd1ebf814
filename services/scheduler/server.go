package scheduler

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	servingv1 "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// Server is the gRPC edge of the scheduler: one service for the clients of runs, one for those of
// served models, one for the other services, and one for external workers.
type Server struct {
	runv1.UnimplementedSchedulerServiceServer
	store      Store
	log        *slog.Logger
	conductors *conductors
	servings   *servings
	runs       *runs
	takeover   *takeover
	deletion   *deletion
	watcher    *watcher
	places     Places
	replicas   bool
	left       []string      // runs that a dead process left active
	caughtUp   chan struct{} // closed when their records have the last steps
}

// New makes the scheduler. It records runs that a dead process left active as INTERRUPTED; with
// Config.ResumeOnStart they stay active and Run continues them. New starts nothing.
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
	records := newRecords(deps)
	conductors := newConductors(cfg, deps, records)
	runs := &runs{Deps: deps, stateDir: cfg.StateDir, records: records, conductors: conductors}
	takeover := &takeover{Deps: deps, resumeOnStart: cfg.ResumeOnStart, records: records, runs: runs}
	servings, err := newServings(cfg, deps, records, conductors)
	if err != nil {
		return nil, err
	}
	deletion := &deletion{Deps: deps, retention: cfg.Retention, keep: cfg.KeepRuns, records: records, runs: runs, servings: servings}
	left, err := takeover.left(ctx)
	if err != nil {
		return nil, err
	}
	if cfg.ResumeOnStart {
		runs.adoptions.expect(left)
	}
	return &Server{
		store: deps.Store, log: deps.Log, conductors: conductors, servings: servings, runs: runs, takeover: takeover, deletion: deletion,
		places: deps.Places, watcher: &watcher{store: deps.Store, conductors: conductors}, replicas: cfg.Replicas, left: left, caughtUp: make(chan struct{}),
	}, nil
}

// Register adds the services to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	runv1.RegisterSchedulerServiceServer(r, s)
	runv1.RegisterSchedulerInternalServiceServer(r, internalServer{store: s.store, conductors: s.conductors, servings: s.servings, runs: s.runs})
	servingv1.RegisterServingServiceServer(r, s.servings)
	runv1.RegisterPlaceServiceServer(r, externalServer{places: s.places})
}

// Run serves until ctx ends. When it returns, the workers of all runs and models are stopped, and
// the records are INTERRUPTED, or PAUSED after a refused gradient. With Config.ResumeOnStart the
// records stay active, and the next scheduler continues the runs; if ctx ends because another one
// leads, or with Config.Replicas, that one also adopts the workers.
func (s *Server) Run(ctx context.Context) error {
	s.takeover.catchUp(ctx, s.left)
	close(s.caughtUp)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		if err := s.takeover.resend(ctx); err != nil && ctx.Err() == nil {
			s.log.WarnContext(ctx, "the events of runs may lack an end", "error", err)
		}
		s.takeover.sweep(ctx)
	})
	wg.Go(func() { s.deletion.serve(ctx) })
	if s.takeover.resumeOnStart {
		for _, id := range s.left {
			wg.Go(func() { s.takeover.adopt(ctx, id) })
		}
	}
	<-ctx.Done()
	s.servings.shutdown()
	var cause error
	switch {
	case errors.Is(context.Cause(ctx), lease.ErrNotLeader):
		cause = launch.ErrRelease
	case s.replicas:
		cause = launch.ErrHandOver
	}
	s.conductors.shutdown(cause)
	if s.places != nil {
		s.places.Close()
	}
	return nil
}

// current waits until the records of the runs that a dead process left behind have their last
// steps, at most catchUpTimeout.
func (s *Server) current(ctx context.Context) {
	if len(s.left) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, catchUpTimeout)
	defer cancel()
	select {
	case <-s.caughtUp:
	case <-ctx.Done():
	}
}

// CreateRun implements the contract.
func (s *Server) CreateRun(ctx context.Context, req *runv1.CreateRunRequest) (*runv1.CreateRunResponse, error) {
	run, err := s.runs.create(ctx, req)
	if err != nil {
		return nil, err
	}
	return &runv1.CreateRunResponse{Run: run}, nil
}

// GetRun implements the contract.
func (s *Server) GetRun(ctx context.Context, req *runv1.GetRunRequest) (*runv1.GetRunResponse, error) {
	s.current(ctx)
	run, err := s.store.Resolve(ctx, visible(ctx), req.GetRunId())
	if err != nil {
		return nil, err
	}
	status, err := s.watcher.status(ctx, run, true, req.GetInFlight())
	if err != nil {
		return nil, err
	}
	return &runv1.GetRunResponse{Status: status}, nil
}

// defaultPage is the number of rows of a page, where a request does not choose.
const defaultPage = 100

// ListRuns implements the contract. The steps of active runs are current.
func (s *Server) ListRuns(ctx context.Context, req *runv1.ListRunsRequest) (*runv1.ListRunsResponse, error) {
	if after := req.GetPageToken(); after != "" && !id.ValidRun(after) {
		return nil, paging.ErrToken(after)
	}
	s.current(ctx)
	size := paging.Size(req.GetPageSize(), defaultPage)
	project := visible(ctx)
	if project == nil || req.Project != nil && *req.Project != *project {
		if project != nil { // of another project, whose runs the key does not see
			return &runv1.ListRunsResponse{}, nil
		}
		project = req.Project
	}
	runs, err := s.store.List(ctx, Filter{States: req.GetStates(), Project: project, After: req.GetPageToken(), Limit: size + 1})
	if err != nil {
		return nil, err
	}
	resp := &runv1.ListRunsResponse{}
	runs, resp.NextPageToken = paging.Cut(runs, size, (*runv1.Run).GetRunId)
	for _, run := range runs {
		if c := s.conductors.get(run.GetRunId()); c != nil {
			advance(run, c.board.progress())
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
	run, err := s.runs.cancel(ctx, id, req.GetDrain())
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
	run, err := s.runs.pause(ctx, id)
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
	run, err := s.runs.resume(ctx, id)
	if err != nil {
		return nil, err
	}
	return &runv1.ResumeRunResponse{Run: run}, nil
}

// DeleteRun implements the contract.
func (s *Server) DeleteRun(ctx context.Context, req *runv1.DeleteRunRequest) (*runv1.DeleteRunResponse, error) {
	if project := visible(ctx); project != nil {
		run, err := s.store.Get(ctx, req.GetRunId())
		if err != nil || run.GetProject() != *project {
			return nil, NotFound(req.GetRunId())
		}
		ctx = apikey.With(ctx, nil) // the deletion looks at the runs of all projects
	}
	return s.deletion.request(ctx, req.GetRunId(), req.GetDryRun())
}

// WatchRun implements the contract. It ends when the run has ended, and with ErrStopping when this
// service stops.
func (s *Server) WatchRun(req *runv1.WatchRunRequest, stream grpc.ServerStreamingServer[runv1.WatchRunResponse]) error {
	id, err := s.resolve(stream.Context(), req.GetRunId())
	if err != nil {
		return err
	}
	return s.watcher.watch(stream.Context(), id, func(status *runv1.RunStatus) error {
		return stream.Send(&runv1.WatchRunResponse{Status: status})
	})
}

// resolve accepts what GetRun accepts: an id, a unique prefix, or a name.
func (s *Server) resolve(ctx context.Context, ref string) (string, error) {
	run, err := s.store.Resolve(ctx, visible(ctx), ref)
	return run.GetRunId(), err
}

// visible is the project whose runs a call sees; nil: all.
func visible(ctx context.Context) *string {
	if project, limited := apikey.ProjectOf(ctx); limited {
		return &project
	}
	return nil
}

// ErrNotExternal means that the scheduler starts all workers itself.
var ErrNotExternal = rpcerr.New(codes.FailedPrecondition, "EXTERNAL_WORKERS_OFF", "no kind of worker is external, so no worker can join").
	Fix("set launch.kind = \"external\", or that of one kind such as launch.inference.kind, in rolloutd.toml")

type externalServer struct {
	runv1.UnimplementedPlaceServiceServer
	places Places
}

// Join implements the contract.
func (s externalServer) Join(stream runv1.PlaceService_JoinServer) error {
	if s.places == nil {
		return ErrNotExternal
	}
	return s.places.Join(stream)
}

type internalServer struct {
	runv1.UnimplementedSchedulerInternalServiceServer
	store      Store
	conductors *conductors
	servings   *servings
	runs       *runs
}

// CompleteRun implements the contract.
func (s internalServer) CompleteRun(ctx context.Context, req *runv1.CompleteRunRequest) (*runv1.CompleteRunResponse, error) {
	if err := s.runs.complete(ctx, req); err != nil {
		return nil, err
	}
	return &runv1.CompleteRunResponse{}, nil
}

// VerifyWorkers implements the contract.
func (s internalServer) VerifyWorkers(ctx context.Context, req *runv1.VerifyWorkersRequest) (*runv1.VerifyWorkersResponse, error) {
	if err := s.runs.adoptions.wait(ctx, req.GetRunId()); err != nil {
		return nil, err
	}
	if c := s.conductors.get(req.GetRunId()); c != nil && c.incarnation == req.GetIncarnation() {
		return &runv1.VerifyWorkersResponse{Accepted: c.supervision.verify(req.GetWorkers())}, nil
	}
	if served, ok := s.servings.verify(req.GetRunId()); ok && served.incarnation == req.GetIncarnation() {
		return &runv1.VerifyWorkersResponse{Accepted: served.verify(req.GetWorkers())}, nil
	}
	return &runv1.VerifyWorkersResponse{Accepted: make([]bool, len(req.GetWorkers()))}, nil
}

// GetProject implements the contract.
func (s internalServer) GetProject(ctx context.Context, req *runv1.GetProjectRequest) (*runv1.GetProjectResponse, error) {
	if project, served := s.servings.project(req.GetRunId()); served {
		return &runv1.GetProjectResponse{Project: project}, nil
	}
	run, err := s.store.Get(ctx, req.GetRunId())
	if errors.Is(err, ErrNotFound) {
		return nil, NotFound(req.GetRunId())
	}
	return &runv1.GetProjectResponse{Project: run.GetProject()}, err
}

// GetStanding implements the contract.
func (s internalServer) GetStanding(ctx context.Context, req *runv1.GetStandingRequest) (*runv1.GetStandingResponse, error) {
	if served, ok := s.servings.verify(req.GetRunId()); ok {
		return &runv1.GetStandingResponse{Incarnation: served.incarnation}, nil
	}
	run, err := s.store.Get(ctx, req.GetRunId())
	if errors.Is(err, ErrNotFound) {
		return nil, NotFound(req.GetRunId())
	}
	ended := run.GetEndTime() != nil && s.runs.Now().Sub(run.GetEndTime().AsTime()) > exitGrace
	return &runv1.GetStandingResponse{Incarnation: run.GetIncarnation(), Ended: ended}, err
}

// GetCursor implements the contract.
func (s internalServer) GetCursor(ctx context.Context, req *runv1.GetCursorRequest) (*runv1.GetCursorResponse, error) {
	run, err := s.store.Get(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	cursor, err := s.store.Cursor(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	data, err := trainData(run)
	if err != nil {
		return nil, err
	}
	return &runv1.GetCursorResponse{Cursor: cursorMessage(cursor.Position, data.Rows)}, nil
}
