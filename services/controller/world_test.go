package controller

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

const run = "run-test"

// world is everything around the controller, durable over its restarts: ledger, snapshots, store, and two workers over
// real gRPC. A fault fires once, at the n-th call of the world.
type world struct {
	t  *testing.T
	mu sync.Mutex

	steps     []*bufferv1.StepRecord
	initial   string // digest recorded for version 0
	snapshots []*snapshotv1.Snapshot
	stored    *Drive
	completed []*runv1.CompleteRunRequest
	events    []*eventv1.Event

	calls   int
	fault   int          // number of the call that fails; 0: none
	onFault func()       // what fails with it
	after   bool         // whether the call takes effect first
	trace   []string     // names of the calls, in order
	watches []*subscribe // of the registry
	starved func()       // called by each lease; where it is set, none gets a batch
	apart   bool         // no inference worker can open the folder of a learner
	fresh   bool         // the inference worker started when nothing was delivered any more

	learner   *fakeLearner
	inference *fakeInference
	servers   map[string]*bufconn.Listener
	stops     map[string]func()
	killed    map[string]*atomic.Bool
	starts    int
}

type subscribe struct {
	name string
	out  chan []discovery.Instance
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, servers: map[string]*bufconn.Listener{}, stops: map[string]func(){}, killed: map[string]*atomic.Bool{}}
	w.startInference()
	w.startLearner()
	t.Cleanup(func() {
		for _, stop := range w.stops {
			stop()
		}
	})
	return w
}

// at counts a call and lets the fault fire. It returns the error the caller gets and whether the call takes effect.
func (w *world) at(name string) (effect bool, err error) {
	w.mu.Lock()
	w.calls++
	w.trace = append(w.trace, name)
	hit := w.fault != 0 && w.calls == w.fault
	w.mu.Unlock()
	if !hit {
		return true, nil
	}
	w.onFault()
	return w.after, status.Error(codes.Unavailable, "fault at "+name)
}

func digestOf(parts ...any) string { return id.Content(fmt.Append(nil, parts...)) }

// digestAt is what a deterministic learner holds after a step.
func digestAt(step uint64) string {
	d := digestOf("initial")
	for s := uint64(1); s <= step; s++ {
		d = digestOf(d, digestOf("batch", s))
	}
	return d
}

func (w *world) serve(address string, register func(*grpc.Server)) {
	killed := &atomic.Bool{}
	gone := func() error {
		if killed.Load() {
			return status.Error(codes.Unavailable, address+" was killed")
		}
		return nil
	}
	server := grpc.NewServer(
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if err := gone(); err != nil {
				return nil, err
			}
			return next(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			if err := gone(); err != nil {
				return err
			}
			return next(srv, stream)
		}),
	)
	register(server)
	listener := bufconn.Listen(1 << 20)
	go func() { _ = server.Serve(listener) }()
	w.mu.Lock()
	w.servers[address], w.stops[address], w.killed[address] = listener, server.Stop, killed
	w.mu.Unlock()
}

func (w *world) dial(address string) (Conn, error) {
	return grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			w.mu.Lock()
			listener := w.servers[address]
			w.mu.Unlock()
			return listener.DialContext(ctx)
		}))
}

func (w *world) startLearner() {
	w.mu.Lock()
	w.starts++
	address := fmt.Sprintf("learner-%d", w.starts)
	w.learner = &fakeLearner{world: w, address: address}
	l := w.learner
	w.mu.Unlock()
	w.serve(address, func(s *grpc.Server) { learnerv1.RegisterLearnerWorkerServiceServer(s, l) })
	w.announce()
}

func (w *world) startInference() {
	w.mu.Lock()
	w.starts++
	address := fmt.Sprintf("inference-%d", w.starts)
	w.inference = &fakeInference{world: w, address: address}
	i := w.inference
	w.mu.Unlock()
	w.serve(address, func(s *grpc.Server) { inferencev1.RegisterInferenceWorkerServiceServer(s, i) })
	w.announce()
}

// kill has a worker answer nothing any more. Its server stops in the background: kill may be called from one of its handlers.
func (w *world) kill(address string) {
	w.mu.Lock()
	stop := w.stops[address]
	w.killed[address].Store(true)
	w.mu.Unlock()
	go stop()
}

func (w *world) Watch(ctx context.Context, name string) <-chan []discovery.Instance {
	s := &subscribe{name: name, out: make(chan []discovery.Instance, 64)}
	w.mu.Lock()
	w.watches = append(w.watches, s)
	w.mu.Unlock()
	context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		close(s.out)
		s.name = ""
	})
	w.announce()
	return s.out
}

func (w *world) announce() {
	w.mu.Lock()
	defer w.mu.Unlock()
	instance := func(name, address string) []discovery.Instance {
		return []discovery.Instance{{Name: name, ID: address, Address: address, Meta: map[string]string{
			"run": run, "incarnation": "1", "worker": address, "process": address,
		}}}
	}
	for _, s := range w.watches {
		switch {
		case s.name == "learner-worker" && w.learner != nil:
			s.out <- instance(s.name, w.learner.address)
		case s.name == "inference-worker" && w.inference != nil:
			s.out <- instance(s.name, w.inference.address)
		}
	}
}

// Ledger.

func (w *world) RecordWeights(_ context.Context, in *bufferv1.RecordWeightsRequest, _ ...grpc.CallOption) (*bufferv1.RecordWeightsResponse, error) {
	effect, err := w.at("RecordWeights")
	if effect {
		w.mu.Lock()
		w.initial = in.GetDigest()
		w.mu.Unlock()
	}
	return &bufferv1.RecordWeightsResponse{}, err
}

func (w *world) LeaseBatch(ctx context.Context, in *bufferv1.LeaseBatchRequest, _ ...grpc.CallOption) (*bufferv1.LeaseBatchResponse, error) {
	if _, err := w.at("LeaseBatch"); err != nil {
		return nil, err
	}
	w.mu.Lock()
	starved := w.starved
	w.mu.Unlock()
	if starved != nil {
		starved()
		sleep(ctx, time.Millisecond) // as the buffer, which holds the request for a while
		return &bufferv1.LeaseBatchResponse{WaitingFor: "samples"}, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if in.GetStep() != uint64(len(w.steps))+1 {
		return nil, status.Errorf(codes.FailedPrecondition, "lease of step %d after %d", in.GetStep(), len(w.steps))
	}
	return &bufferv1.LeaseBatchResponse{Batch: batch(in.GetStep())}, nil
}

func batch(step uint64) *bufferv1.Batch {
	return &bufferv1.Batch{RunId: run, Step: step, BatchId: digestOf("batch", step), Groups: 2, Samples: make([]*bufferv1.SampleRef, 4)}
}

func (w *world) CommitStep(_ context.Context, in *bufferv1.CommitStepRequest, _ ...grpc.CallOption) (*bufferv1.CommitStepResponse, error) {
	effect, fault := w.at("CommitStep")
	w.mu.Lock()
	defer w.mu.Unlock()
	record := &bufferv1.StepRecord{Step: in.GetStep(), BatchId: in.GetBatchId(), WeightsDigest: in.GetWeightsDigest()}
	switch n := uint64(len(w.steps)); {
	case in.GetStep() == n && proto.Equal(w.steps[n-1], record):
	case in.GetStep() != n+1:
		return nil, status.Errorf(codes.FailedPrecondition, "commit of step %d after %d", in.GetStep(), n)
	case effect:
		w.steps = append(w.steps, record)
	}
	return &bufferv1.CommitStepResponse{Step: record}, fault
}

func (w *world) GetBatch(_ context.Context, in *bufferv1.GetBatchRequest, _ ...grpc.CallOption) (*bufferv1.GetBatchResponse, error) {
	_, err := w.at("GetBatch")
	return &bufferv1.GetBatchResponse{Batch: batch(in.GetStep())}, err
}

func (w *world) ListSteps(context.Context, *bufferv1.ListStepsRequest, ...grpc.CallOption) (*bufferv1.ListStepsResponse, error) {
	_, err := w.at("ListSteps")
	w.mu.Lock()
	defer w.mu.Unlock()
	return &bufferv1.ListStepsResponse{Steps: append([]*bufferv1.StepRecord(nil), w.steps...)}, err
}

func (w *world) TrimPayloads(context.Context, *bufferv1.TrimPayloadsRequest, ...grpc.CallOption) (*bufferv1.TrimPayloadsResponse, error) {
	_, err := w.at("TrimPayloads")
	return &bufferv1.TrimPayloadsResponse{}, err
}

// Snapshots.

func (w *world) CreateSnapshot(_ context.Context, in *snapshotv1.CreateSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.CreateSnapshotResponse, error) {
	effect, err := w.at("CreateSnapshot")
	if effect {
		w.mu.Lock()
		s := proto.CloneOf(in.GetSnapshot())
		s.SnapshotId = fmt.Sprintf("snap-%d", s.GetStep())
		w.snapshots = append(w.snapshots, s)
		w.mu.Unlock()
	}
	return &snapshotv1.CreateSnapshotResponse{}, err
}

func (w *world) GetSnapshot(context.Context, *snapshotv1.GetSnapshotRequest, ...grpc.CallOption) (*snapshotv1.GetSnapshotResponse, error) {
	return nil, status.Error(codes.Unimplemented, "not asked for")
}

func (w *world) ListSnapshots(context.Context, *snapshotv1.ListSnapshotsRequest, ...grpc.CallOption) (*snapshotv1.ListSnapshotsResponse, error) {
	_, err := w.at("ListSnapshots")
	w.mu.Lock()
	defer w.mu.Unlock()
	resp := &snapshotv1.ListSnapshotsResponse{}
	if n := len(w.snapshots); n > 0 {
		resp.Snapshots = w.snapshots[n-1:]
	}
	return resp, err
}

func (w *world) MaterializeSnapshot(_ context.Context, in *snapshotv1.MaterializeSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.MaterializeSnapshotResponse, error) {
	_, err := w.at("MaterializeSnapshot")
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.snapshots {
		if s.GetSnapshotId() == in.GetSnapshotId() {
			return &snapshotv1.MaterializeSnapshotResponse{Snapshot: s}, err
		}
	}
	return nil, status.Error(codes.NotFound, in.GetSnapshotId())
}

// Scheduler, store, events.

func (w *world) CompleteRun(_ context.Context, in *runv1.CompleteRunRequest, _ ...grpc.CallOption) (*runv1.CompleteRunResponse, error) {
	effect, err := w.at("CompleteRun")
	if effect {
		w.mu.Lock()
		w.completed = append(w.completed, in)
		w.mu.Unlock()
	}
	return &runv1.CompleteRunResponse{}, err
}

func (w *world) Save(_ context.Context, d *Drive) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stored = d
	return nil
}

func (w *world) Get(context.Context, string) (*Drive, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stored == nil {
		return nil, ErrNotFound
	}
	return w.stored, nil
}

func (w *world) Active(context.Context) ([]*Drive, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stored != nil && w.stored.Active {
		return []*Drive{w.stored}, nil
	}
	return nil, nil
}

func (w *world) Emit(e *eventv1.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
}

// start runs a controller until stop is called.
func (w *world) start() (s *Server, stop func()) {
	s, err := New(Config{Retry: time.Millisecond}, Deps{
		Store: w, Buffer: w, Snapshots: w, Scheduler: w, Registry: w, Dial: w.dial, Events: w,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.Run(ctx)
	}()
	return s, func() { cancel(); <-ended }
}

func request(t *testing.T, steps uint64) *learnerv1.StartRunRequest {
	return &learnerv1.StartRunRequest{
		RunId: run, Incarnation: 1, RunDirectory: t.TempDir(),
		Plan: &planv1.Plan{
			Config: &configv1.RunConfig{
				Deterministic: proto.Bool(true),
				Train:         &configv1.TrainConfig{Steps: &steps, GroupsPerStep: proto.Uint32(2), DeliverEverySteps: proto.Uint64(1)},
				Eval:          &configv1.EvalConfig{EverySteps: proto.Uint64(2)},
				Snapshot:      &configv1.SnapshotConfig{EverySteps: proto.Uint64(2)},
			},
			Inputs: []*planv1.Input{{Role: planv1.InputRole_INPUT_ROLE_TRAIN_DATA, Rows: 5}},
		},
	}
}

// fakeLearner is a learner whose weights are a hash chain over the batches.
type fakeLearner struct {
	learnerv1.UnimplementedLearnerWorkerServiceServer
	world   *world
	address string
	step    uint64
	digest  string // empty before Initialize
	drift   string // mixed into each step: a learner that does not repeat itself
	refuses uint64 // step whose gradient it refuses

	published sync.Map // digest -> folder
}

func (l *fakeLearner) GetLearnerStatus(context.Context, *learnerv1.GetLearnerStatusRequest) (*learnerv1.GetLearnerStatusResponse, error) {
	return &learnerv1.GetLearnerStatusResponse{Step: l.step, Initialized: l.digest != "", WeightsDigest: l.digest}, nil
}

func (l *fakeLearner) Initialize(_ context.Context, in *learnerv1.InitializeRequest) (*learnerv1.InitializeResponse, error) {
	effect, err := l.world.at("Initialize")
	if effect && l.digest == "" {
		l.step, l.digest = in.GetStep(), digestAt(in.GetStep())
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
		return status.Errorf(codes.FailedPrecondition, "step %d asked for at %d", in.GetStep(), l.step)
	}
	result := &learnerv1.TrainResult{Step: l.step, WeightsDigest: l.digest, Metrics: map[string]float64{"loss": 1},
		Completions: []*learnerv1.Completion{{Index: 4, Prompt: "1+1=", Completion: "2", Reward: 1, Advantage: proto.Float64(0.5)}}}
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

// forget removes the folders of all that was published, as when a host loses its memory.
func (l *fakeLearner) forget() {
	l.published.Range(func(_, folder any) bool { return os.RemoveAll(folder.(string)) == nil })
}

func (l *fakeLearner) PublishWeights(context.Context, *learnerv1.PublishWeightsRequest) (*learnerv1.PublishWeightsResponse, error) {
	_, err := l.world.at("PublishWeights")
	return &learnerv1.PublishWeightsResponse{Weights: l.manifest()}, err
}

// OfferWeights offers a patch to who holds the step before this one, else the whole; of what it published itself.
func (l *fakeLearner) OfferWeights(_ context.Context, in *learnerv1.OfferWeightsRequest) (*learnerv1.OfferWeightsResponse, error) {
	if _, held := l.published.Load(in.GetDigest()); !held {
		return nil, rpcerr.New(codes.NotFound, "WEIGHTS_NOT_HELD", "not published here")
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
	if in.GetStep() != l.step || !filepath.IsAbs(in.GetDirectory()) {
		return nil, status.Errorf(codes.FailedPrecondition, "state of step %d asked for at %d", in.GetStep(), l.step)
	}
	return &learnerv1.SaveStateResponse{WeightsDigest: l.digest}, err
}

// EvaluateLoss answers for the step that the learner stands at.
func (l *fakeLearner) EvaluateLoss(_ context.Context, in *learnerv1.EvaluateLossRequest) (*learnerv1.EvaluateLossResponse, error) {
	_, err := l.world.at("EvaluateLoss")
	if in.GetStep() != l.step {
		return nil, status.Errorf(codes.FailedPrecondition, "step %d asked for at %d", in.GetStep(), l.step)
	}
	return &learnerv1.EvaluateLossResponse{Metrics: map[string]float64{"loss": 0.5, "rewards/accuracy": 0.75}, Rows: 8, Refused: 2}, err
}

// fakeInference is an inference worker that holds what it is told to.
type fakeInference struct {
	inferencev1.UnimplementedInferenceWorkerServiceServer
	world   *world
	address string
	corrupt bool // holds something else than it was sent
	refuses func(in *inferencev1.LoadWeightsRequest) error

	mu      sync.Mutex
	receipt *weightsv1.WeightsReceipt
	offered []string // how each version came: "folder", or the forms and sources that were offered
}

func (i *fakeInference) LoadWeights(_ context.Context, in *inferencev1.LoadWeightsRequest) (*inferencev1.LoadWeightsResponse, error) {
	effect, err := i.world.at("LoadWeights")
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(in.GetOffers()) == 0 && (i.world.apart || missing(in.GetWeights())) {
		return nil, notHeld(reasonUnreadable)
	}
	if i.refuses != nil {
		if err := i.refuses(in); err != nil {
			return nil, err
		}
	}
	i.offered = append(i.offered, described(in.GetOffers()))
	if effect {
		i.receipt = &weightsv1.WeightsReceipt{Version: in.GetWeights().GetVersion(), Digest: in.GetWeights().GetDigest()}
		if i.corrupt {
			i.receipt.Digest = digestOf("something else")
		}
	}
	return &inferencev1.LoadWeightsResponse{Receipt: i.receipt}, err
}

func (i *fakeInference) Evaluate(in *inferencev1.EvaluateRequest, stream grpc.ServerStreamingServer[inferencev1.EvaluateResponse]) error {
	if _, err := i.world.at("Evaluate"); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.receipt.GetVersion() != in.GetVersion() {
		return status.Errorf(codes.FailedPrecondition, "version %d asked for at %d", in.GetVersion(), i.receipt.GetVersion())
	}
	return stream.Send(&inferencev1.EvaluateResponse{Samples: []*inferencev1.EvalSample{{Prompt: "1+1=", Completion: "2", Reward: 1}}})
}
