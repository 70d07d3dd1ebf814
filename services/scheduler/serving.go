package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/worker"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	servingv1 "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// Errors of served models.
var (
	ErrServingNotFound = rpcerr.New(codes.NotFound, "SERVING_NOT_FOUND", "no served model has this id or name").Fix("`rollout serve list` shows the served models")
	ErrServingName     = rpcerr.New(codes.AlreadyExists, "SERVING_NAME_TAKEN", "another model is served under this name").
				Fix("choose another name with --name, or stop it with `rollout serve stop`")
	ErrServingFailed = rpcerr.New(codes.FailedPrecondition, "SERVING_FAILED", "a worker of the served model failed")
	ErrModelMissing  = rpcerr.New(codes.NotFound, "MODEL_FOLDER_MISSING", "the folder of the model does not exist").
				Fix("correct the path: it is a folder in the Hugging Face layout on the host of the scheduler")
	ErrModelInvalid = rpcerr.New(codes.FailedPrecondition, "MODEL_FOLDER_INVALID", "the folder is not that of a model").
			Fix("copy the whole folder of the model, or save model and tokenizer with `save_pretrained`")
)

// servings serves models without a run: inference workers alone, whose registrations the gateway
// finds like those of a run. They end with the scheduler. Safe for concurrent use.
type servings struct {
	servingv1.UnimplementedServingServiceServer
	cfg     Config
	deps    Deps
	records *records
	runs    *conductors

	base context.Context // ends when the scheduler stops
	stop context.CancelFunc

	mu   sync.Mutex
	byID map[string]*serving
}

// newServings removes what a process that was killed has left in the folder.
func newServings(cfg Config, deps Deps, records *records, runs *conductors) (*servings, error) {
	s := &servings{cfg: cfg, deps: deps, records: records, runs: runs, byID: map[string]*serving{}}
	s.base, s.stop = context.WithCancel(context.Background())
	if err := os.RemoveAll(s.folder()); err != nil {
		return nil, fmt.Errorf("scheduler: remove the folders of models that are no longer served: %w", err)
	}
	return s, nil
}

// folder is that of all served models.
func (s *servings) folder() string { return filepath.Join(s.cfg.StateDir, "serve") }

// serving is one served model.
//
//	STARTING --a worker has registered--> SERVING --the last worker left--> STARTING
//	any --a worker crashes too often--> FAILED    any --stop--> removed
type serving struct {
	*scope
	supervision *supervision
	about       *servingv1.Serving // what does not change
	cancel      context.CancelFunc
	ended       chan struct{} // closed when no worker is left
	failure     error         // set before ended is closed; nil after a stop
}

// start begins to serve a model.
func (s *servings) start(project string, req *servingv1.ServeModelRequest) (*serving, error) {
	config := servedConfig(req.GetConfig())
	folder := config.GetModel().GetPath()
	if !filepath.IsAbs(folder) {
		folder = filepath.Join(req.GetBaseDir(), folder)
	}
	config.Model.Path = &folder
	if err := checkModelFolder(folder); err != nil {
		return nil, err
	}
	if run := s.runs.named(config.GetName()); run != "" {
		return nil, ErrServingName.WithMessage("the active run %s has the name %s", run, config.GetName()).Fix("choose another name with --name")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.base.Err() != nil {
		return nil, ErrStopping
	}
	for _, other := range s.byID {
		if other.about.GetName() == config.GetName() && other.failed() == nil {
			return nil, ErrServingName.WithMessage("%s is served under the name %s already, as %s", other.about.GetModel(), config.GetName(), other.run)
		}
	}
	now := s.deps.Now().UTC()
	name := id.NewServing(now)
	record := &Run{
		RunId: name, Name: config.GetName(), Plan: &planv1.Plan{Config: config}, BaseDir: req.GetBaseDir(), State: Running,
		Directory: filepath.Join(s.folder(), name), CreateTime: timestamppb.New(now), Incarnation: 1,
		Project: project,
	}
	if err := os.MkdirAll(filepath.Join(record.GetDirectory(), "workers"), 0o700); err != nil {
		return nil, rpcerr.New(codes.Internal, "SERVING_FOLDER", "make the folder of the served model: %w", err)
	}
	board := newBoard(record, s.deps.Now)
	sc := &scope{
		Deps: s.deps, records: s.records, board: board, retry: retry.New(name, board.blocked, s.deps.Log), run: name, incarnation: 1,
	}
	ctx, cancel := context.WithCancel(s.base)
	out := &serving{
		scope: sc, cancel: cancel, ended: make(chan struct{}),
		supervision: &supervision{
			scope: sc, cfg: s.cfg.Worker, alone: func() bool { return false },
			weights: func(*Run) (string, uint64) { return folder, req.GetWeightsVersion() }, renewal: newRenewal(sc, s.cfg.Worker.Issue),
		},
		about: &servingv1.Serving{
			ServingId: name, Name: config.GetName(), Model: folder, WeightsVersion: req.GetWeightsVersion(), Engine: config.GetEngine().GetKind(),
			Workers: uint32(worker.Inference.Count(config)), CreateTime: record.GetCreateTime(), Detached: req.GetDetached(),
		},
	}
	s.byID[name] = out
	go out.serve(ctx, record)
	return out, nil
}

// servedConfig is the configuration of the workers: they sample for requests alone.
func servedConfig(given *configv1.RunConfig) *configv1.RunConfig {
	config := proto.CloneOf(given)
	config.Environment = &configv1.EnvironmentConfig{Kind: proto.String("external")}
	config.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Grpo{Grpo: &configv1.GrpoConfig{}}}
	config.Deterministic = proto.Bool(false)
	config.Reward, config.Eval, config.Lora, config.Sinks = nil, nil, nil, nil
	if config.Model == nil {
		config.Model = &configv1.ModelConfig{}
	}
	if config.Weights == nil {
		config.Weights = &configv1.WeightsConfig{}
	}
	config.Weights.Update = proto.String("in_flight") // a worker of an atomic run waits for its controller
	return config
}

// checkModelFolder reports what every model has to have. The worker reports the rest.
func checkModelFolder(folder string) error {
	info, err := os.Stat(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return ErrModelMissing.With("folder", folder).WithMessage("the folder of the model does not exist: %s", folder)
	}
	if err != nil || !info.IsDir() {
		return ErrModelInvalid.With("folder", folder).WithMessage("%s is not a folder that can be read", folder)
	}
	has := func(name string) bool {
		_, err := os.Stat(filepath.Join(folder, name))
		return err == nil
	}
	if !has("config.json") {
		return ErrModelInvalid.With("folder", folder).WithMessage("%s has no config.json", folder)
	}
	if !slices.ContainsFunc([]string{"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"}, has) {
		return ErrModelInvalid.With("folder", folder).WithMessage("%s has no tokenizer: neither tokenizer.json, tokenizer.model, nor a vocabulary", folder)
	}
	return nil
}

// serve runs the workers until ctx ends or one of them fails for good.
func (s *serving) serve(ctx context.Context, record *Run) {
	defer close(s.ended)
	err := runUntilFirst(ctx, s.supervision.parts(record, []worker.Kind{worker.Inference}))
	if ctx.Err() == nil && err != nil {
		var loop *launch.CrashLoop
		if s.failure = ErrServingFailed.WithMessage("%s", rpcerr.Text(err)); errors.As(err, &loop) {
			s.failure = ErrServingFailed.WithMessage("the workers of %s failed: %s", s.about.GetName(), loop.Error())
		}
	}
	if removed := os.RemoveAll(record.GetDirectory()); removed != nil {
		s.Log.WarnContext(ctx, "the folder of a served model could not be removed", "serving", s.run, "error", removed)
	}
}

// failed is why no worker is left; nil while it is served and after a stop.
func (s *serving) failed() error {
	select {
	case <-s.ended:
		return s.failure
	default:
		return nil
	}
}

// state is the state now.
func (s *serving) state() *servingv1.Serving {
	out := proto.CloneOf(s.about)
	out.State = servingv1.ServingState_SERVING_STATE_STARTING
	if err := s.failed(); err != nil {
		out.State, out.Message = servingv1.ServingState_SERVING_STATE_FAILED, rpcerr.Text(err)
		return out
	}
	for _, w := range s.board.workers() {
		if w.healthy() {
			out.ReadyWorkers++
		}
	}
	if out.GetReadyWorkers() > 0 {
		out.State = servingv1.ServingState_SERVING_STATE_SERVING
	}
	if out.GetReadyWorkers() < out.GetWorkers() {
		s.board.read(func(v *view) {
			for _, wait := range v.fleet.absent(v.run.GetRunId()).waits {
				out.Message = wait.GetEvidence()
			}
		})
	}
	return out
}

// remove stops a served model and forgets it.
func (s *servings) remove(served *serving) {
	served.cancel()
	<-served.ended
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, served.run)
}

// shutdown stops all of them.
func (s *servings) shutdown() {
	s.mu.Lock()
	s.stop()
	all := s.list()
	s.mu.Unlock()
	for _, each := range all {
		<-each.ended
	}
}

// list is all served models, oldest first. The caller has the lock.
func (s *servings) list() (out []*serving) {
	for _, each := range s.byID {
		out = append(out, each)
	}
	slices.SortFunc(out, func(a, b *serving) int { return cmp.Compare(a.run, b.run) })
	return out
}

// visible is list for a caller. The caller has the lock.
func (s *servings) visible(ctx context.Context) []*serving {
	project := visible(ctx)
	return slices.DeleteFunc(s.list(), func(each *serving) bool { return project != nil && each.board.record().GetProject() != *project })
}

// project returns the project of a served model; false if there is no such model.
func (s *servings) project(servingID string) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	served := s.byID[servingID]
	if served == nil {
		return "", false
	}
	return served.board.record().GetProject(), true
}

// reads returns the name of a served model whose folder is in a folder, with that folder; "" if
// there is none.
func (s *servings) reads(folder string) (name, path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, each := range s.list() {
		if within(each.about.GetModel(), folder) {
			return each.about.GetName(), each.about.GetModel()
		}
	}
	return "", ""
}

// verify reports which registrations belong to workers of a served model.
func (s *servings) verify(servingID string) (*supervision, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	served := s.byID[servingID]
	if served == nil {
		return nil, false
	}
	return served.supervision, true
}

// ServeModel implements the contract.
func (s *servings) ServeModel(req *servingv1.ServeModelRequest, stream grpc.ServerStreamingServer[servingv1.ServeModelResponse]) error {
	ctx := stream.Context()
	project, _ := apikey.ProjectOf(ctx)
	served, err := s.start(project, req)
	if err != nil {
		return err
	}
	var last *servingv1.Serving
	for {
		changed := served.board.Changes()
		if state := served.state(); !proto.Equal(state, last) {
			if err := stream.Send(&servingv1.ServeModelResponse{Serving: state}); err != nil {
				break
			}
			last = state
		}
		select {
		case <-changed:
			continue
		case <-served.ended:
			s.remove(served)
			if s.base.Err() != nil {
				return ErrStopping
			}
			return served.failure
		case <-ctx.Done():
		}
		break
	}
	if !req.GetDetached() {
		s.remove(served)
	}
	return ctx.Err()
}

// ListServings implements the contract.
func (s *servings) ListServings(ctx context.Context, req *servingv1.ListServingsRequest) (*servingv1.ListServingsResponse, error) {
	last := req.GetPageToken()
	if last != "" && !id.ServedModel(last) {
		return nil, paging.ErrToken(last)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	resp := &servingv1.ListServingsResponse{}
	var page []*serving
	page, resp.NextPageToken = paging.After(s.visible(ctx), func(each *serving) bool { return each.run <= last },
		paging.Size(req.GetPageSize(), defaultPage), func(each *serving) string { return each.run })
	for _, each := range page {
		resp.Servings = append(resp.Servings, each.state())
	}
	return resp, nil
}

// StopServing implements the contract. Of several with a name it stops the newest.
func (s *servings) StopServing(ctx context.Context, req *servingv1.StopServingRequest) (*servingv1.StopServingResponse, error) {
	s.mu.Lock()
	var found *serving
	for _, each := range s.visible(ctx) {
		if each.run == req.GetServingId() || each.about.GetName() == req.GetServingId() {
			found = each
		}
	}
	s.mu.Unlock()
	if found == nil {
		return nil, ErrServingNotFound.With("serving", req.GetServingId()).WithMessage("no served model has the id or name %s", req.GetServingId())
	}
	state := found.state()
	s.remove(found)
	return &servingv1.StopServingResponse{Serving: state}, nil
}
