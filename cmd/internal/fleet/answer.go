package main

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/cmd/internal/scripted"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// weights is the current version of all engines, which load a version immediately.
type weights struct {
	mu      sync.Mutex
	version uint64
	changed chan struct{} // closed at the next version
}

// now returns the current version, and a channel that is closed at the next one.
func (w *weights) now() (uint64, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.changed == nil {
		w.changed = make(chan struct{})
	}
	return w.version, w.changed
}

func (w *weights) load(version uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if version <= w.version {
		return
	}
	w.version = version
	if w.changed != nil {
		close(w.changed)
		w.changed = nil
	}
}

// digest returns the digest of a version, equal in all workers.
func digest(version uint64) string { return fmt.Sprintf("blake3-%064x", version) }

func receipt(version uint64) *weightsv1.WeightsReceipt {
	return &weightsv1.WeightsReceipt{Version: version, Digest: digest(version), CacheEpoch: version}
}

// answers serves the calls of the controller and the gateway for all inference workers.
type answers struct {
	inferencev1.UnimplementedInferenceWorkerServiceServer
	weights *weights
	aborts  *scripted.Aborts // of completions
}

func (a *answers) LoadWeights(_ context.Context, req *inferencev1.LoadWeightsRequest) (*inferencev1.LoadWeightsResponse, error) {
	a.weights.load(req.GetWeights().GetVersion())
	return &inferencev1.LoadWeightsResponse{Receipt: receipt(req.GetWeights().GetVersion())}, nil
}

func (a *answers) GetInferenceStatus(context.Context, *inferencev1.GetInferenceStatusRequest) (*inferencev1.GetInferenceStatusResponse, error) {
	version, _ := a.weights.now()
	return &inferencev1.GetInferenceStatusResponse{Receipt: receipt(version)}, nil
}

// learner makes a step in a fixed time and reads no payloads.
type learner struct {
	learnerv1.UnimplementedLearnerWorkerServiceServer
	weights *weights
	pace    pace
	step    atomic.Uint64
}

func (l *learner) manifest(run string, version uint64) *weightsv1.WeightsManifest {
	return &weightsv1.WeightsManifest{RunId: run, Version: version, Digest: digest(version), Directory: "/nowhere/v" + strconv.FormatUint(version, 10), Dtype: "bfloat16"}
}

func (l *learner) Initialize(context.Context, *learnerv1.InitializeRequest) (*learnerv1.InitializeResponse, error) {
	return &learnerv1.InitializeResponse{WeightsDigest: digest(0), ProcessId: "fleet"}, nil
}

func (l *learner) GetLearnerStatus(context.Context, *learnerv1.GetLearnerStatusRequest) (*learnerv1.GetLearnerStatusResponse, error) {
	step := l.step.Load()
	return &learnerv1.GetLearnerStatusResponse{Step: step, WeightsDigest: digest(step), ProcessId: "fleet"}, nil
}

func (l *learner) Train(req *learnerv1.TrainRequest, stream grpc.ServerStreamingServer[learnerv1.TrainResponse]) error {
	timer := time.NewTimer(l.pace.train)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
	l.step.Store(req.GetStep())
	result := &learnerv1.TrainResult{
		Step: req.GetStep(), WeightsDigest: digest(req.GetStep()), Weights: l.manifest(req.GetRunId(), req.GetStep()),
		Metrics: map[string]float64{"loss": 0, "reward/mean": 0, "samples": float64(len(req.GetBatch().GetSamples()))},
	}
	return stream.Send(&learnerv1.TrainResponse{Kind: &learnerv1.TrainResponse_Result{Result: result}})
}

func (l *learner) PublishWeights(_ context.Context, req *learnerv1.PublishWeightsRequest) (*learnerv1.PublishWeightsResponse, error) {
	return &learnerv1.PublishWeightsResponse{Weights: l.manifest(req.GetRunId(), l.step.Load())}, nil
}

// hostPort of an address that this process listens on.
func hostPort(address string) (host string, port int) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		panic(err)
	}
	port, err = strconv.Atoi(text)
	if err != nil {
		panic(err)
	}
	return host, port
}
