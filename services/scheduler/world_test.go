package scheduler_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/id"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/worker"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	servingv1 "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/sqlstore"
)

// world is the surroundings of a scheduler: services that keep their state when the scheduler dies,
// and workers that sample what is published.
type world struct {
	t         *testing.T
	dir       string
	store     *sqlstore.Store
	mesh      *mesh
	planner   *planner
	snapshots *snapshots
	erased    *erased
	registry  *registry
	launcher  *launcher
	events    *events
	config    scheduler.Config
	// realLauncher starts real processes; nil: launcher.
	realLauncher launch.Launcher
	wrapBus      func(scheduler.Bus) scheduler.Bus
	dial         func(run string, incarnation uint32, address string) (scheduler.Conn, error)
	generation   *generation
	log          *slog.Logger // of the scheduler; nil: none, or the test's
}

// generation is one process of the scheduler.
type generation struct {
	*scheduler.Server
	internal runv1.SchedulerInternalServiceServer
	serving  servingv1.ServingServiceServer
	gate     *gate
	stop     func()
	end      func(cause error) // stop, for this reason
}

const rows = 7

func setup(t *testing.T) *world {
	t.Helper()
	return setupAt(t, sqldb.Files(t.TempDir()))
}

func setupAt(t *testing.T, place sqldb.Place) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir(), planner: &planner{}, snapshots: &snapshots{}, events: &events{}, erased: &erased{}}
	w.registry = &registry{lists: map[string][]discovery.Instance{}, changed: make(chan struct{})}
	w.launcher = &launcher{registry: w.registry}
	w.mesh = newMesh(t)
	w.mesh.events, w.mesh.erased, w.snapshots.erased = w.events, w.erased, w.erased
	var text bytes.Buffer
	for row := range rows {
		fmt.Fprintf(&text, `{"prompt": "row %d"}`+"\n", row)
	}
	w.planner.data = text.Bytes()
	if err := os.WriteFile(filepath.Join(w.dir, "train.jsonl"), text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	store, err := sqlstore.Open(t.Context(), place)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	w.store = store
	w.config = scheduler.Config{StateDir: w.dir, Worker: scheduler.WorkerConfig{
		Command: []string{"worker"}, Env: []string{"HOME=/home"}, Issue: credential.Claims.String, Cores: 8, NATSURL: "nats://here",
		BusEnv: []string{"NATS_PASSWORD=x"}, NATSToken: "env:NATS_TOKEN", NATS: &runv1.NatsAccess{Password: "env:NATS_PASSWORD"},
		Limits: launch.Limits{FirstBackoff: time.Millisecond, StopGrace: 5 * time.Second},
	}}
	w.dial = func(string, uint32, string) (scheduler.Conn, error) { return nil, io.ErrClosedPipe }
	return w
}

// start makes a scheduler on the world's store.
func (w *world) start() *generation {
	w.t.Helper()
	g := &generation{gate: &gate{}}
	w.mesh.mu.Lock()
	w.mesh.scheduler = g
	w.mesh.mu.Unlock()
	var bus scheduler.Bus = gatedBus{g.gate, w.mesh.bus}
	if w.wrapBus != nil {
		bus = w.wrapBus(bus)
	}
	var launcher launch.Launcher = w.launcher
	if w.realLauncher != nil {
		launcher = w.realLauncher
	}
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(w.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	if w.log != nil {
		log = w.log
	}
	var err error
	g.Server, err = scheduler.New(w.config, scheduler.Deps{
		Store: gatedStore{w.store, g.gate}, Planner: w.planner, Buffer: gatedBuffer{w.mesh.ledger, g.gate}, Controller: gatedController{w.mesh.controller, g.gate},
		Snapshots: w.snapshots, Sessions: w.erased.sessions(), EventLog: w.erased.log(), Bus: bus, Registry: w.registry, Launcher: launcher, Dial: w.dial, Events: w.events, Log: log,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	g.Register(registrar(func(desc *grpc.ServiceDesc, impl any) {
		if internal, ok := impl.(runv1.SchedulerInternalServiceServer); ok {
			g.internal = internal
		}
		if serving, ok := impl.(servingv1.ServingServiceServer); ok {
			g.serving = serving
		}
	}))
	ctx, cancel := context.WithCancelCause(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- g.Run(ctx) }()
	wait := sync.OnceFunc(func() {
		if err := <-ran; err != nil {
			w.t.Error(err)
		}
	})
	g.end = func(cause error) { cancel(cause); wait() }
	g.stop = func() { g.end(nil) }
	w.t.Cleanup(g.stop)
	w.generation = g
	return g
}

// kill ends the scheduler as a power cut would: later calls of it have no effect.
func (w *world) kill() {
	w.generation.gate.close()
	w.generation.stop()
	w.launcher.endAll() // workers see the end of their standard input
}

type registrar func(*grpc.ServiceDesc, any)

func (r registrar) RegisterService(desc *grpc.ServiceDesc, impl any) { r(desc, impl) }

// plan is a run of so many steps of three groups of two samples.
func plan(steps uint64, mode string, staleness uint32, sft bool) *planv1.Plan {
	groups, size, attempts, restarts, seed, shuffle, name, seconds, workers := uint32(3), uint32(2), uint32(2), uint32(2), uint64(7), true, "test-run", 60.0, uint32(1)
	c := &configv1.RunConfig{
		Name: &name, Seed: &seed, Mode: &mode, Data: &configv1.DataConfig{Shuffle: &shuffle},
		Sampling: &configv1.SamplingConfig{GroupSize: &size}, Train: &configv1.TrainConfig{Steps: &steps, GroupsPerStep: &groups},
		Engine: &configv1.EngineConfig{Workers: &workers}, Staleness: &configv1.StalenessConfig{MaxSteps: &staleness},
		Limits:    &configv1.LimitsConfig{GroupAttempts: &attempts, WorkerRestarts: &restarts, WorkerStartSeconds: &seconds},
		Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Grpo{Grpo: &configv1.GrpoConfig{}}},
	}
	if sft {
		c.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Sft{Sft: &configv1.SftConfig{}}}
	}
	return &planv1.Plan{Format: planformat.Format, PlanId: id.Content([]byte("plan")), Config: c}
}

// create makes a run of a plan.
func (w *world) create(p *planv1.Plan) *scheduler.Run {
	w.t.Helper()
	w.planner.set(p)
	resp, err := w.generation.CreateRun(w.t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir})
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.GetRun()
}

// wait watches a run until its status matches.
func (w *world) wait(run string, what func(*runv1.RunStatus) bool) *runv1.RunStatus {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Minute)
	defer cancel()
	watch := &watcher{ctx: ctx, cancel: cancel, what: what}
	err := w.generation.WatchRun(&runv1.WatchRunRequest{RunId: run}, watch)
	for err == nil && watch.found == nil && ctx.Err() == nil { // it was interrupted and is about to be resumed
		err = w.generation.WatchRun(&runv1.WatchRunRequest{RunId: run}, watch)
	}
	if watch.found == nil {
		w.t.Fatalf("%v; the last status was %v", err, watch.last)
	}
	return watch.found
}

func (w *world) waitState(run string, want scheduler.State) *runv1.RunStatus {
	w.t.Helper()
	return w.wait(run, func(s *runv1.RunStatus) bool { return s.GetRun().GetState() == want })
}

type watcher struct {
	grpc.ServerStream
	ctx         context.Context
	cancel      context.CancelFunc
	what        func(*runv1.RunStatus) bool
	last, found *runv1.RunStatus
}

func (s *watcher) Context() context.Context { return s.ctx }

func (s *watcher) Send(r *runv1.WatchRunResponse) error {
	s.last = r.GetStatus()
	if s.found == nil && s.what(s.last) {
		s.found = s.last
		s.cancel()
	}
	return nil
}

// ---- services around ---------------------------------------------------------------------------

type planner struct {
	mu       sync.Mutex
	data     []byte
	plan     *planv1.Plan
	problems []*planv1.Problem
	asked    int
	away     atomic.Int32 // this many calls fail
}

func (p *planner) set(plan *planv1.Plan) {
	plan = proto.CloneOf(plan)
	plan.Inputs = []*planv1.Input{{Role: planv1.InputRole_INPUT_ROLE_TRAIN_DATA, Path: "train.jsonl", Digest: id.Content(p.data), Rows: rows}}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.plan = plan
}

func (p *planner) VerifyPlan(context.Context, *planv1.VerifyPlanRequest, ...grpc.CallOption) (*planv1.VerifyPlanResponse, error) {
	if p.away.Add(-1) >= 0 {
		return nil, status.Error(codes.Unavailable, "unavailable")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	return &planv1.VerifyPlanResponse{Plan: p.plan, Problems: p.problems}, nil
}

type snapshots struct {
	snap    *snapshotv1.Snapshot
	held    []*snapshotv1.Snapshot // pinned before
	pinned  []string
	erased  *erased
	adopted atomic.Int32 // calls of AdoptEpisodes
}

func (s *snapshots) GetSnapshot(context.Context, *snapshotv1.GetSnapshotRequest, ...grpc.CallOption) (*snapshotv1.GetSnapshotResponse, error) {
	return &snapshotv1.GetSnapshotResponse{Snapshot: s.snap}, nil
}

func (s *snapshots) ListSnapshots(_ context.Context, in *snapshotv1.ListSnapshotsRequest, _ ...grpc.CallOption) (*snapshotv1.ListSnapshotsResponse, error) {
	if !in.GetPinned() {
		return nil, status.Error(codes.InvalidArgument, "only the pinned snapshots are of interest")
	}
	return &snapshotv1.ListSnapshotsResponse{Snapshots: s.held}, nil
}

func (s *snapshots) AdoptEpisodes(context.Context, *snapshotv1.AdoptEpisodesRequest, ...grpc.CallOption) (*snapshotv1.AdoptEpisodesResponse, error) {
	s.adopted.Add(1)
	return &snapshotv1.AdoptEpisodesResponse{}, nil
}

func (s *snapshots) PinSnapshot(_ context.Context, in *snapshotv1.PinSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.PinSnapshotResponse, error) {
	s.pinned = append(s.pinned, in.GetSnapshotId())
	return &snapshotv1.PinSnapshotResponse{Snapshot: s.snap}, nil
}

type events struct {
	onEmit func(*eventv1.Event) // called with each event; may be nil
	mu     sync.Mutex
	all    []*eventv1.Event

	flushed, stored int              // how many are on the bus, and in the storage
	late            []*eventv1.Event // events that were not stored when a success was reported
}

// Flush implements scheduler.Events.
func (e *events) Flush(context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.flushed = len(e.all)
	return nil
}

func (e *events) Emit(event *eventv1.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if event.GetAttributes()["state"] == "SUCCEEDED" {
		e.late = e.all[e.stored:]
	}
	e.all = append(e.all, event)
	if e.onEmit != nil {
		e.onEmit(event)
	}
}

// of returns the events of a kind, each as the value of one attribute.
func (e *events) of(kind, attribute string) (out []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, event := range e.all {
		if event.GetKind() == kind {
			out = append(out, event.GetAttributes()[attribute])
		}
	}
	return out
}

type registry struct {
	mu      sync.Mutex
	lists   map[string][]discovery.Instance
	changed chan struct{}
}

func (r *registry) Watch(ctx context.Context, name string) <-chan []discovery.Instance {
	out := make(chan []discovery.Instance)
	go func() {
		defer close(out)
		for {
			r.mu.Lock()
			list, changed := append([]discovery.Instance(nil), r.lists[name]...), r.changed
			r.mu.Unlock()
			select {
			case out <- list:
			case <-ctx.Done():
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

func (r *registry) change(name string, change func([]discovery.Instance) []discovery.Instance) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lists[name] = change(r.lists[name])
	close(r.changed)
	r.changed = make(chan struct{})
}

// launcher starts workers that register at once and live until they are stopped or crashed.
type launcher struct {
	onLaunch func(*runv1.WorkerSpec) // called at each start; may be nil
	registry *registry
	mu       sync.Mutex
	commands []launch.Command
	specs    []*runv1.WorkerSpec
	running  map[int]*process
}

type process struct {
	l     *launcher
	pid   int
	proof string
	name  string
	spec  *runv1.WorkerSpec
	done  chan struct{}
	exit  launch.Exit
	once  sync.Once
}

func (l *launcher) Launch(c launch.Command) (launch.Process, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	spec := &runv1.WorkerSpec{}
	for _, e := range c.Env {
		if path, ok := strings.CutPrefix(e, "ROLLOUT_WORKER_SPEC="); ok {
			text, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			if err := protojson.Unmarshal(text, spec); err != nil {
				return nil, err
			}
		}
	}
	l.commands, l.specs = append(l.commands, c), append(l.specs, spec)
	if l.onLaunch != nil {
		defer l.onLaunch(spec)
	}
	p := &process{l: l, pid: 1000 + len(l.specs), name: spec.GetKind() + "-worker", spec: spec, done: make(chan struct{})}
	p.proof = worker.Proof(spec.GetNonce(), spec.GetWorkerId(), 0, fmt.Sprintf("host:%d", p.pid))
	if l.running == nil {
		l.running = map[int]*process{}
	}
	l.running[p.pid] = p
	l.registry.change(p.name, func(list []discovery.Instance) []discovery.Instance {
		return append(list, discovery.Instance{
			Name: p.name, ID: p.id(), Address: fmt.Sprintf("host:%d", p.pid),
			Meta: map[string]string{
				worker.MetaRun: spec.GetRunId(), worker.MetaWorker: spec.GetWorkerId(), worker.MetaIncarnation: fmt.Sprint(spec.GetIncarnation()),
				worker.MetaRank: "0", worker.MetaProof: p.proof, worker.MetaPID: "1", // as under torchrun: the process that registers is another one
			},
		})
	})
	return p, nil
}

func (p *process) id() string { return p.spec.GetRunId() + "/" + p.spec.GetWorkerId() }

func (p *process) end(e launch.Exit) {
	p.once.Do(func() {
		p.l.registry.change(p.name, func(list []discovery.Instance) (left []discovery.Instance) {
			for _, in := range list {
				if in.Meta[worker.MetaProof] != p.proof {
					left = append(left, in)
				}
			}
			return left
		})
		p.l.mu.Lock()
		delete(p.l.running, p.pid)
		p.l.mu.Unlock()
		p.exit = e
		close(p.done)
	})
}

func (p *process) ID() string            { return fmt.Sprint("process-", p.pid) }
func (p *process) PID() int              { return p.pid }
func (p *process) Done() <-chan struct{} { return p.done }
func (p *process) Exit() launch.Exit     { <-p.done; return p.exit }
func (p *process) Stop(time.Duration)    { p.end(launch.Exit{}) }

func (l *launcher) processes() (out []*process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.running {
		out = append(out, p)
	}
	return out
}

func (l *launcher) endAll() {
	for _, p := range l.processes() {
		p.end(launch.Exit{})
	}
}

// crash ends the running process of a worker.
func (l *launcher) crash(worker string, e launch.Exit) {
	for _, p := range l.processes() {
		if p.spec.GetWorkerId() == worker {
			p.end(e)
		}
	}
}

func (l *launcher) spec(worker string, nth int) *runv1.WorkerSpec {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.specs {
		if s.GetWorkerId() == worker {
			if nth--; nth < 0 {
				return s
			}
		}
	}
	return nil
}

// gate fails all calls once it is closed.
type gate struct {
	closed atomic.Bool
	full   atomic.Bool  // the disk of the databases is full: every write to them fails
	away   atomic.Int32 // so many reads of a cursor fail
	frozen atomic.Pointer[freeze]
}

// freeze is the call at which a process is suspended until it is thawed.
type freeze struct {
	at            string
	reached, thaw chan struct{}
}

func (g *gate) freeze(at string) *freeze {
	f := &freeze{at: at, reached: make(chan struct{}), thaw: make(chan struct{})}
	g.frozen.Store(f)
	return f
}

// pass returns err at a call where the process may be suspended.
func (g *gate) pass(at string) error {
	if f := g.frozen.Load(); f != nil && f.at == at && g.frozen.CompareAndSwap(f, nil) {
		close(f.reached)
		<-f.thaw
	}
	return g.err()
}

func (g *gate) close() { g.closed.Store(true) }

// write returns err at a call that writes to a database.
func (g *gate) write() error {
	if g.full.Load() {
		return rpcerr.ErrDiskFull
	}
	return g.err()
}

func (g *gate) err() error {
	if g.closed.Load() {
		return status.Error(codes.Unavailable, "this process is dead")
	}
	return nil
}

type gatedStore struct {
	scheduler.Store
	gate *gate
}

func (s gatedStore) Cursor(ctx context.Context, run string) (scheduler.Cursor, error) {
	if s.gate.away.Add(-1) >= 0 {
		return scheduler.Cursor{}, sqldb.ErrUnavailable
	}
	return s.Store.Cursor(ctx, run)
}

func (s gatedStore) Update(ctx context.Context, run string, change func(*scheduler.Run) error) (*scheduler.Run, error) {
	if err := s.gate.write(); err != nil {
		return nil, err
	}
	return s.Store.Update(ctx, run, change)
}

func (s gatedStore) Advance(ctx context.Context, run string, from, to uint64) error {
	if err := s.gate.write(); err != nil {
		return err
	}
	return s.Store.Advance(ctx, run, from, to)
}

func (s gatedStore) KeepQueues(ctx context.Context, run string, q *runv1.Queues) error {
	if err := s.gate.write(); err != nil {
		return err
	}
	return s.Store.KeepQueues(ctx, run, q)
}

type gatedBus struct {
	gate *gate
	scheduler.Bus
}

func (b gatedBus) Publish(ctx context.Context, messages ...bus.Message) error {
	if err := b.gate.err(); err != nil {
		return err
	}
	return b.Bus.Publish(ctx, messages...)
}

func (b gatedBus) PurgeWork(ctx context.Context, run string, before uint64) error {
	if err := b.gate.pass("PurgeWork"); err != nil {
		return err
	}
	return b.Bus.PurgeWork(ctx, run, before)
}

type gatedBuffer struct {
	scheduler.Buffer
	gate *gate
}

func (b gatedBuffer) CloseLedger(ctx context.Context, in *bufferv1.CloseLedgerRequest, o ...grpc.CallOption) (*bufferv1.CloseLedgerResponse, error) {
	if err := b.gate.pass("CloseLedger"); err != nil {
		return nil, err
	}
	return b.Buffer.CloseLedger(ctx, in, o...)
}

func (b gatedBuffer) ReissueGroups(ctx context.Context, in *bufferv1.ReissueGroupsRequest, o ...grpc.CallOption) (*bufferv1.ReissueGroupsResponse, error) {
	if err := b.gate.write(); err != nil {
		return nil, err
	}
	return b.Buffer.ReissueGroups(ctx, in, o...)
}

func (b gatedBuffer) ExcludeGroups(ctx context.Context, in *bufferv1.ExcludeGroupsRequest, o ...grpc.CallOption) (*bufferv1.ExcludeGroupsResponse, error) {
	if err := b.gate.write(); err != nil {
		return nil, err
	}
	return b.Buffer.ExcludeGroups(ctx, in, o...)
}

type gatedController struct {
	scheduler.Controller
	gate *gate
}

func (c gatedController) StopRun(ctx context.Context, in *learnerv1.StopRunRequest, o ...grpc.CallOption) (*learnerv1.StopRunResponse, error) {
	if err := c.gate.pass("StopRun"); err != nil {
		return nil, err
	}
	return c.Controller.StopRun(ctx, in, o...)
}
