package controller

import (
	"cmp"
	"context"
	"fmt"
	"net"
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
	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/worker"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

const run = "run-test"

// world is everything around the controller, and survives its restarts: ledger, snapshots, store,
// and two workers over real gRPC. A fault happens once, at the n-th call.
type world struct {
	t  *testing.T
	mu sync.Mutex

	steps      []*bufferv1.StepRecord
	initial    string            // digest recorded for version 0
	retrained  map[uint64]string // digests of versions that were retrained with other bits
	lineage    uint32
	oldLineage bufferv1.OldLineage // of the request that began the lineage
	snapshots  []*snapshotv1.Snapshot
	pinned     []string // ids of snapshots, as often as they were pinned
	stored     *Drive
	leaders    fencetest.Memory
	completed  []*runv1.CompleteRunRequest
	events     []*eventv1.Event
	flushed    int              // number of events on the bus
	late       []*eventv1.Event // events that were not on the bus when an end was reported to the scheduler

	calls   int
	fault   int            // number of the call that fails; 0: none
	only    string         // if set, fault counts the calls with this name; others may come in another order
	onFault func()         // what else fails
	after   bool           // whether the call takes effect first
	trace   []string       // names of the calls, in order
	watches []*subscribe   // of the registry
	refuse  uint64         // the step whose commit fails; 0: none
	starved func()         // if set, called by each lease instead of returning a batch
	full    map[string]int // how many calls of a name still fail because a disk is full
	disk    *fakeDisk
	apart   bool // no inference worker can open the folder of a learner
	fresh   bool // the inference worker started after the last delivery

	incarnation string // of the workers; empty: 1
	update      string // weights.update; empty: the default

	learner   *fakeLearner
	inference *fakeInference
	reserved  *fakeInference // for evaluations; nil: none
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
	w := &world{t: t, disk: &fakeDisk{}, retrained: map[uint64]string{}, servers: map[string]*bufconn.Listener{}, stops: map[string]func(){}, killed: map[string]*atomic.Bool{}}
	w.startInference()
	w.startLearner()
	t.Cleanup(func() {
		for _, stop := range w.stops {
			stop()
		}
	})
	return w
}

// at counts a call and triggers the fault. It returns whether the call takes effect, and its error.
func (w *world) at(name string) (effect bool, err error) {
	w.mu.Lock()
	if w.only == "" || w.only == name {
		w.calls++
	}
	w.trace = append(w.trace, name)
	hit := w.fault != 0 && w.calls == w.fault && (w.only == "" || w.only == name)
	full := w.full[name] > 0
	if full {
		w.full[name]--
	}
	w.mu.Unlock()
	if full {
		return w.after, rpcerr.ErrDiskFull.WithMessage("%s finds a full disk", name).GRPCStatus().Err()
	}
	if !hit {
		return true, nil
	}
	w.onFault()
	return w.after, status.Error(codes.Unavailable, "fault at "+name)
}

func digestOf(parts ...any) string { return id.Content(fmt.Append(nil, parts...)) }

// digestAt is the digest of a deterministic learner after a step.
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

func (w *world) dial(_ string, _ uint32, address string) (Conn, error) {
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

// startReserved starts a worker that only evaluates.
func (w *world) startReserved() *fakeInference {
	w.mu.Lock()
	w.starts++
	i := &fakeInference{world: w, address: fmt.Sprintf("inference-%d", w.starts), hold: make(chan struct{})}
	w.reserved = i
	w.mu.Unlock()
	w.serve(i.address, func(s *grpc.Server) { inferencev1.RegisterInferenceWorkerServiceServer(s, i) })
	w.announce()
	return i
}

// kill makes a worker fail every call. Its server stops in the background, because a handler of the
// worker may call kill.
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
			"run": run, "incarnation": cmp.Or(w.incarnation, "1"), "worker": address, "process": address, "rank": "0",
		}}}
	}
	for _, s := range w.watches {
		switch {
		case s.name == "learner-worker" && w.learner != nil:
			s.out <- instance(s.name, w.learner.address)
		case s.name == "inference-worker" && w.inference != nil:
			list := instance(s.name, w.inference.address)
			if w.reserved != nil {
				list = append(list, instance(s.name, w.reserved.address)...)
				list[1].Meta[worker.MetaReserved] = "true"
			}
			s.out <- list
		}
	}
}

// start runs a controller until stop is called.
func (w *world) start() (s *Server, stop func()) {
	s, err := New(Config{Retry: time.Millisecond, DiskPause: time.Millisecond}, Deps{
		Store: w, Buffer: w, Snapshots: w, Scheduler: w, Registry: w, Dial: w.dial, Events: w,
		Disk: func(string) Disk { return w.disk },
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

// request starts the run of the world.
func (w *world) request(t *testing.T) *learnerv1.StartRunRequest {
	req := request(t, steps)
	if w.update != "" {
		req.Plan.Config.Weights = &configv1.WeightsConfig{Update: &w.update}
	}
	return req
}

func request(t *testing.T, steps uint64) *learnerv1.StartRunRequest {
	return &learnerv1.StartRunRequest{
		RunId: run, Fence: fencetest.Scheduler(1, 1), RunDirectory: t.TempDir(),
		Plan: &planv1.Plan{
			Config: &configv1.RunConfig{
				Deterministic: proto.Bool(true),
				Train:         &configv1.TrainConfig{Steps: &steps, GroupsPerStep: proto.Uint32(2), DeliverEverySteps: proto.Uint64(1)},
				Eval:          &configv1.EvalConfig{EverySteps: proto.Uint64(2)},
				Snapshot:      &configv1.SnapshotConfig{EverySteps: proto.Uint64(2)},
				Health:        &configv1.HealthConfig{OnCollapse: proto.String("warn"), Steps: proto.Uint32(2), LossFactor: proto.Float64(2)},
			},
			Inputs: []*planv1.Input{{Role: planv1.InputRole_INPUT_ROLE_TRAIN_DATA, Rows: 5}},
		},
	}
}
