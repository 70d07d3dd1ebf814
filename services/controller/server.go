package controller

import (
	"context"
	"sync"

	"google.golang.org/grpc"

	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
)

// Server is the gRPC edge, and the owner of the drives.
type Server struct {
	learnerv1.UnimplementedLearnerControllerServiceServer
	cfg  Config
	deps Deps

	mu      sync.Mutex
	life    context.Context // nil before Run
	waiting []*drive        // started before Run
	drives  map[string]*drive
	wg      sync.WaitGroup
}

// New makes the service. It starts nothing.
func New(cfg Config, deps Deps) (*Server, error) {
	if err := deps.check(); err != nil {
		return nil, err
	}
	cfg.defaults()
	return &Server{cfg: cfg, deps: deps, drives: map[string]*drive{}}, nil
}

// Register adds the service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	learnerv1.RegisterLearnerControllerServiceServer(r, s)
}

// Run continues the active drives, and drives runs until ctx ends. It waits for all drives.
func (s *Server) Run(ctx context.Context) error {
	active, err := s.deps.Store.Active(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.life = ctx
	for _, d := range s.waiting {
		s.launch(d)
	}
	s.waiting = nil
	for _, d := range active {
		if _, ok := s.drives[d.Spec.GetRunId()]; !ok {
			s.add(newDrive(s.cfg, s.deps, &Drive{Spec: d.Spec, Phase: preparing, Weights: d.Weights, Health: d.Health, Gates: d.Gates, Evaluation: d.Evaluation}))
		}
	}
	s.mu.Unlock()
	<-ctx.Done()
	s.wg.Wait()
	return nil
}

// add launches a drive, or keeps it until Run is called. The caller has the lock.
func (s *Server) add(d *drive) {
	s.drives[d.runID] = d
	if s.life == nil {
		s.waiting = append(s.waiting, d)
		return
	}
	s.launch(d)
}

func (s *Server) launch(d *drive) {
	life := s.life
	s.wg.Go(func() {
		d.run(life)
		s.release(life, d)
	})
}

// release forgets a drive that has ended: the store has its last progress. One that a shutdown
// ended, or whose end is not stored, stays.
func (s *Server) release(ctx context.Context, d *drive) {
	known, err := s.deps.Store.Get(ctx, d.runID)
	if err != nil || !ended(known.Phase) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.drives[d.runID] == d {
		delete(s.drives, d.runID)
	}
}

// StartRun implements the contract.
func (s *Server) StartRun(ctx context.Context, req *learnerv1.StartRunRequest) (*learnerv1.StartRunResponse, error) {
	for {
		s.mu.Lock()
		known := s.drives[req.GetRunId()]
		if known == nil || known.over() {
			defer s.mu.Unlock()
			return s.start(ctx, req)
		}
		err := s.deps.Store.Admit(ctx, req.GetRunId(), req.GetFence())
		if err == nil && known.incarnation != req.GetFence().GetIncarnation() {
			known.request(false)
		}
		s.mu.Unlock()
		if err != nil || known.incarnation == req.GetFence().GetIncarnation() {
			return &learnerv1.StartRunResponse{}, err
		}
		if err := known.wait(ctx); err != nil {
			return nil, err
		}
	}
}

// start begins to drive a run that has no drive or an ended one. The caller has the lock.
func (s *Server) start(ctx context.Context, req *learnerv1.StartRunRequest) (*learnerv1.StartRunResponse, error) {
	d := &Drive{Spec: req, Phase: preparing, Active: true}
	if before, err := s.deps.Store.Get(ctx, req.GetRunId()); err == nil {
		known, asked := before.Spec.GetFence(), req.GetFence()
		again := before.Phase == stopped && !before.Active && known.GetLeaderEpoch() < asked.GetLeaderEpoch() // another scheduler has stopped it
		if known.GetIncarnation() == asked.GetIncarnation() && ended(before.Phase) && !again {                // a late repetition of a request whose run has ended
			return &learnerv1.StartRunResponse{}, s.deps.Store.Admit(ctx, req.GetRunId(), asked)
		}
		d.Weights, d.Health, d.Gates, d.Evaluation = before.Weights, before.Health, before.Gates, before.Evaluation
	}
	if err := s.deps.Store.Save(ctx, d, req.GetFence()); err != nil {
		return nil, err
	}
	s.add(newDrive(s.cfg, s.deps, d))
	return &learnerv1.StartRunResponse{}, nil
}

// StopRun implements the contract.
func (s *Server) StopRun(ctx context.Context, req *learnerv1.StopRunRequest) (*learnerv1.StopRunResponse, error) {
	d, err := s.find(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	if err := s.stop(ctx, d, req.GetFence(), req.GetDrain()); err != nil {
		return nil, err
	}
	p, _ := d.progress.read()
	return &learnerv1.StopRunResponse{Progress: p}, nil
}

// stop stops a drive, unless a former leader has decided it, and returns when it has ended. A
// request of the new leader comes either before both the check and the stop, or after both.
func (s *Server) stop(ctx context.Context, d *drive, by *fencev1.Fence, drain bool) error {
	s.mu.Lock()
	err := s.deps.Store.Admit(ctx, d.runID, by)
	if err == nil {
		d.request(drain)
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	return d.wait(ctx)
}

// DeleteRun implements the contract.
func (s *Server) DeleteRun(ctx context.Context, req *learnerv1.DeleteRunRequest) (*learnerv1.DeleteRunResponse, error) {
	s.mu.Lock()
	d := s.drives[req.GetRunId()]
	s.mu.Unlock()
	if d != nil {
		if err := s.stop(ctx, d, req.GetFence(), false); err != nil {
			return nil, err
		}
		s.mu.Lock()
		if s.drives[d.runID] == d {
			delete(s.drives, d.runID)
		}
		s.mu.Unlock()
	}
	if err := s.deps.Store.Delete(ctx, req.GetRunId(), req.GetFence()); err != nil {
		return nil, err
	}
	return &learnerv1.DeleteRunResponse{}, nil
}

// GetProgress implements the contract.
func (s *Server) GetProgress(ctx context.Context, req *learnerv1.GetProgressRequest) (*learnerv1.GetProgressResponse, error) {
	d, err := s.find(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	p, _ := d.progress.read()
	return &learnerv1.GetProgressResponse{Progress: p}, nil
}

// WatchProgress implements the contract.
func (s *Server) WatchProgress(req *learnerv1.WatchProgressRequest, stream grpc.ServerStreamingServer[learnerv1.WatchProgressResponse]) error {
	d, err := s.find(stream.Context(), req.GetRunId())
	if err != nil {
		return err
	}
	for {
		p, changed := d.progress.read()
		if err := stream.Send(&learnerv1.WatchProgressResponse{Progress: p}); err != nil {
			return err
		}
		if ended(p.GetPhase()) {
			return nil
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-changed:
		}
	}
}

// find returns the drive of a run; for a run that an earlier process drove, its last progress.
func (s *Server) find(ctx context.Context, run string) (*drive, error) {
	s.mu.Lock()
	d := s.drives[run]
	s.mu.Unlock()
	if d != nil {
		return d, nil
	}
	known, err := s.deps.Store.Get(ctx, run)
	if err != nil {
		return nil, err
	}
	phase := known.Phase
	if !ended(phase) {
		phase = stopped
	}
	d = newDrive(s.cfg, s.deps, &Drive{Spec: known.Spec, Phase: phase, Step: known.Step, Weights: known.Weights})
	close(d.done)
	return d, nil
}
