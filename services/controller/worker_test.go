package controller

import (
	"context"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// fakeLearner is a learner whose weights are a hash chain over the batches.
type fakeLearner struct {
	learnerv1.UnimplementedLearnerWorkerServiceServer
	world   *world
	address string
	step    uint64
	digest  string                               // empty before Initialize
	drift   string                               // mixed into each step: a learner that does not repeat itself
	refuses uint64                               // step whose gradient it refuses
	metrics func(step uint64) map[string]float64 // of its steps; nil: a loss of 1

	published sync.Map      // digest -> folder
	copied    sync.Map      // folder -> digest, of states that are written later
	writes    chan struct{} // closed: they may be written; nil: at once
}

func (l *fakeLearner) GetLearnerStatus(context.Context, *learnerv1.GetLearnerStatusRequest) (*learnerv1.GetLearnerStatusResponse, error) {
	return &learnerv1.GetLearnerStatusResponse{Step: l.step, Initialized: l.digest != "", WeightsDigest: l.digest}, nil
}

func (l *fakeLearner) Initialize(_ context.Context, in *learnerv1.InitializeRequest) (*learnerv1.InitializeResponse, error) {
	effect, err := l.world.at("Initialize")
	if effect && (l.digest == "" || in.GetReplace()) {
		l.step, l.digest = in.GetStep(), digestAt(in.GetStep())
		if text, err := os.ReadFile(filepath.Join(in.GetStateDirectory(), "digest")); err == nil {
			l.digest = string(text)
		}
	}
	return &learnerv1.InitializeResponse{Step: l.step, WeightsDigest: l.digest}, err
}

func (l *fakeLearner) Train(in *learnerv1.TrainRequest, stream grpc.ServerStreamingServer[learnerv1.TrainResponse]) error {
	effect, fault := l.world.at("Train")
	if fault == nil && in.GetStep() == l.refuses {
		return rpcerr.New(codes.FailedPrecondition, refusal.Exploding, "step %d: kept in step.npz", in.GetStep()).GRPCStatus().Err()
	}
	if effect && in.GetStep() == l.step+1 {
		l.step, l.digest = in.GetStep(), digestOf(l.digest, in.GetBatch().GetBatchId()+l.drift)
	}
	if fault != nil {
		return fault
	}
	if in.GetStep() != l.step {
		return status.Errorf(codes.FailedPrecondition, "step %d requested at %d", in.GetStep(), l.step)
	}
	result := &learnerv1.TrainResult{Step: l.step, WeightsDigest: l.digest, Metrics: map[string]float64{"loss": 1},
		Completions: []*learnerv1.Completion{{Index: 4, Prompt: "1+1=", Completion: "2", Reward: 1, Advantage: proto.Float64(0.5)}}}
	if l.metrics != nil {
		result.Metrics = l.metrics(l.step)
	}
	if in.GetPublish() {
		result.Weights = l.manifest()
	}
	return stream.Send(&learnerv1.TrainResponse{Kind: &learnerv1.TrainResponse_Result{Result: result}})
}

// manifest publishes the weights as they are.
func (l *fakeLearner) manifest() *weightsv1.WeightsManifest {
	folder := l.world.t.TempDir()
	l.published.Store(l.digest, folder)
	return &weightsv1.WeightsManifest{RunId: run, Version: l.step, Digest: l.digest, Directory: folder}
}

// forget removes the folders of all published weights, as when a host loses its memory.
func (l *fakeLearner) forget() {
	l.published.Range(func(_, folder any) bool { return os.RemoveAll(folder.(string)) == nil })
}

func (l *fakeLearner) PublishWeights(context.Context, *learnerv1.PublishWeightsRequest) (*learnerv1.PublishWeightsResponse, error) {
	_, err := l.world.at("PublishWeights")
	return &learnerv1.PublishWeightsResponse{Weights: l.manifest()}, err
}

// OfferWeights offers a patch upon the previous step, or else the whole weights, of what this
// learner published.
func (l *fakeLearner) OfferWeights(_ context.Context, in *learnerv1.OfferWeightsRequest) (*learnerv1.OfferWeightsResponse, error) {
	if _, found := l.published.Load(in.GetDigest()); !found {
		return nil, rpcerr.New(codes.NotFound, "WEIGHTS_NOT_FOUND", "not published here")
	}
	offer := &weightsv1.WeightsOffer{Version: l.step, Digest: in.GetDigest(), Form: weightsv1.WeightsForm_WEIGHTS_FORM_WHOLE, Bytes: 100}
	if l.step > 0 && !in.GetWhole() && in.GetBaseDigest() == digestAt(l.step-1) {
		offer.Form, offer.BaseDigest = weightsv1.WeightsForm_WEIGHTS_FORM_PATCH, in.GetBaseDigest()
	}
	if in.GetStore() {
		offer.ContentId = digestOf("stored", l.step)
	}
	return &learnerv1.OfferWeightsResponse{Offers: []*weightsv1.WeightsOffer{offer}}, nil
}

func (l *fakeLearner) SaveState(_ context.Context, in *learnerv1.SaveStateRequest) (*learnerv1.SaveStateResponse, error) {
	_, err := l.world.at("SaveState")
	if in.GetCopied() {
		if in.GetStep() != l.step || !filepath.IsAbs(in.GetDirectory()) {
			return nil, l.outOfTurn(in)
		}
		l.copied.Store(in.GetDirectory(), l.digest)
		return &learnerv1.SaveStateResponse{}, err
	}
	if digest, found := l.copied.LoadAndDelete(in.GetDirectory()); found {
		if l.writes != nil {
			<-l.writes
		}
		return &learnerv1.SaveStateResponse{WeightsDigest: digest.(string)}, err
	}
	if in.GetStep() != l.step || !filepath.IsAbs(in.GetDirectory()) {
		return nil, l.outOfTurn(in)
	}
	return &learnerv1.SaveStateResponse{WeightsDigest: l.digest}, err
}

func (l *fakeLearner) outOfTurn(in *learnerv1.SaveStateRequest) error {
	return rpcerr.New(codes.FailedPrecondition, reasonStep, "state of step %d requested at %d", in.GetStep(), l.step).GRPCStatus().Err()
}

// EvaluateLoss evaluates the current step of the learner.
func (l *fakeLearner) EvaluateLoss(_ context.Context, in *learnerv1.EvaluateLossRequest) (*learnerv1.EvaluateLossResponse, error) {
	_, err := l.world.at("EvaluateLoss")
	if in.GetStep() != l.step {
		return nil, status.Errorf(codes.FailedPrecondition, "step %d requested at %d", in.GetStep(), l.step)
	}
	return &learnerv1.EvaluateLossResponse{Metrics: map[string]float64{"loss": 0.5, "rewards/accuracy": 0.75}, Rows: 8, Refused: 2}, err
}

// fakeInference is an inference worker that loads what it is given.
type fakeInference struct {
	inferencev1.UnimplementedInferenceWorkerServiceServer
	world   *world
	address string
	corrupt bool // loads other weights than it is given
	refuses func(in *inferencev1.LoadWeightsRequest) error
	hold    chan struct{} // evaluations after the first wait until it is closed; nil: none waits

	mu      sync.Mutex
	receipt *weightsv1.WeightsReceipt
	staged  *weightsv1.WeightsManifest
	paused  bool
	evals   []uint64 // versions that were evaluated
	offered []string // how each version was transferred: "folder", or the forms and sources of the offers
}

func (i *fakeInference) LoadWeights(_ context.Context, in *inferencev1.LoadWeightsRequest) (*inferencev1.LoadWeightsResponse, error) {
	effect, err := i.world.at("LoadWeights")
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(in.GetOffers()) == 0 && (i.world.apart || missing(in.GetWeights())) {
		return nil, refusalOf(reasonUnreadable)
	}
	if i.refuses != nil {
		if err := i.refuses(in); err != nil {
			return nil, err
		}
	}
	i.offered = append(i.offered, describe(in.GetOffers()))
	if effect {
		i.receipt = &weightsv1.WeightsReceipt{Version: in.GetWeights().GetVersion(), Digest: in.GetWeights().GetDigest()}
		if i.corrupt {
			i.receipt.Digest = digestOf("something else")
		}
	}
	return &inferencev1.LoadWeightsResponse{Receipt: i.receipt}, err
}

func (i *fakeInference) StageWeights(_ context.Context, in *inferencev1.StageWeightsRequest) (*inferencev1.StageWeightsResponse, error) {
	effect, err := i.world.at("StageWeights")
	i.mu.Lock()
	defer i.mu.Unlock()
	if missing(in.GetWeights()) {
		return nil, refusalOf(reasonUnreadable)
	}
	if effect {
		i.staged = in.GetWeights()
	}
	return &inferencev1.StageWeightsResponse{}, err
}

func (i *fakeInference) CommitWeights(_ context.Context, in *inferencev1.CommitWeightsRequest) (*inferencev1.CommitWeightsResponse, error) {
	effect, err := i.world.at("CommitWeights")
	i.mu.Lock()
	defer i.mu.Unlock()
	if effect && i.receipt.GetDigest() != in.GetDigest() {
		if i.staged.GetDigest() != in.GetDigest() {
			return nil, refusalOf("WEIGHTS_NOT_STAGED")
		}
		i.receipt = &weightsv1.WeightsReceipt{Version: in.GetVersion(), Digest: in.GetDigest()}
	}
	return &inferencev1.CommitWeightsResponse{Receipt: i.receipt}, err
}

func (i *fakeInference) PauseEngine(context.Context, *inferencev1.PauseEngineRequest) (*inferencev1.PauseEngineResponse, error) {
	effect, err := i.world.at("PauseEngine")
	i.mu.Lock()
	defer i.mu.Unlock()
	i.paused = i.paused || effect
	return &inferencev1.PauseEngineResponse{}, err
}

func (i *fakeInference) ResumeEngine(context.Context, *inferencev1.ResumeEngineRequest) (*inferencev1.ResumeEngineResponse, error) {
	effect, err := i.world.at("ResumeEngine")
	i.mu.Lock()
	defer i.mu.Unlock()
	i.paused = i.paused && !effect
	return &inferencev1.ResumeEngineResponse{}, err
}

func (i *fakeInference) Evaluate(in *inferencev1.EvaluateRequest, stream grpc.ServerStreamingServer[inferencev1.EvaluateResponse]) error {
	if _, err := i.world.at("Evaluate"); err != nil {
		return err
	}
	if i.hold != nil && in.GetVersion() > 0 {
		select {
		case <-i.hold:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.evals = append(i.evals, in.GetVersion())
	if i.receipt.GetVersion() != in.GetVersion() {
		return status.Errorf(codes.FailedPrecondition, "version %d requested at %d", in.GetVersion(), i.receipt.GetVersion())
	}
	return stream.Send(&inferencev1.EvaluateResponse{Samples: []*inferencev1.EvalSample{{Prompt: "1+1=", Completion: "2", Reward: 1}}})
}
