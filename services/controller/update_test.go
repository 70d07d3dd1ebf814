package controller

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// engines is the engines of a fleet, and what they serve at any time.
type engines struct {
	t  *testing.T
	mu sync.Mutex

	all        []*engine
	committing int
	most       int // that committed at the same time
	mixed      int // times at which two versions were served
	staged     int // engines that have staged version 1

	left, caught []string
}

// engine is a worker as the fleet calls it.
type engine struct {
	inferencev1.InferenceWorkerServiceClient
	fleet *engines
	name  string

	version, staged uint64
	paused          bool
	until           time.Time    // end of the pause
	stage           func() error // nil: succeeds
	commit          func() error
	early           bool // committed before all engines had staged
}

func (e *engines) fenced(worker string, err error) { e.t.Errorf("%s was fenced: %v", worker, err) }

func (e *engines) leftOut(worker string, _ uint64, _ error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.left = append(e.left, worker)
}

func (e *engines) caughtUp(worker string, _ *weightsv1.WeightsManifest) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.caught = append(e.caught, worker)
}

// changed looks at what is served. The caller has the lock.
func (e *engines) changed() {
	serving := map[uint64]bool{}
	for _, one := range e.all {
		if !one.paused {
			serving[one.version] = true
		}
	}
	if len(serving) > 1 {
		e.mixed++
	}
}

func (e *engine) do(change func()) {
	e.fleet.mu.Lock()
	defer e.fleet.mu.Unlock()
	change()
	e.fleet.changed()
}

func (e *engine) LoadWeights(ctx context.Context, in *inferencev1.LoadWeightsRequest, _ ...grpc.CallOption) (*inferencev1.LoadWeightsResponse, error) {
	if _, err := e.StageWeights(ctx, &inferencev1.StageWeightsRequest{Weights: in.GetWeights()}); err != nil {
		return nil, err
	}
	e.do(func() { e.version = in.GetWeights().GetVersion() })
	return &inferencev1.LoadWeightsResponse{Receipt: &weightsv1.WeightsReceipt{Version: in.GetWeights().GetVersion(), Digest: in.GetWeights().GetDigest()}}, nil
}

func (e *engine) StageWeights(_ context.Context, in *inferencev1.StageWeightsRequest, _ ...grpc.CallOption) (*inferencev1.StageWeightsResponse, error) {
	if e.stage != nil {
		if err := e.stage(); err != nil {
			return nil, err
		}
	}
	e.do(func() {
		if e.staged = in.GetWeights().GetVersion(); e.staged == 1 {
			e.fleet.staged++
		}
	})
	return &inferencev1.StageWeightsResponse{}, nil
}

func (e *engine) CommitWeights(_ context.Context, in *inferencev1.CommitWeightsRequest, _ ...grpc.CallOption) (*inferencev1.CommitWeightsResponse, error) {
	if e.commit != nil {
		if err := e.commit(); err != nil {
			return nil, err
		}
	}
	e.do(func() {
		e.fleet.committing++
		e.fleet.most = max(e.fleet.most, e.fleet.committing)
		e.early = e.early || in.GetVersion() == 1 && e.fleet.staged < len(e.fleet.all)-len(e.fleet.left)
	})
	<-time.After(time.Millisecond) // commits that may overlap do
	e.do(func() { e.version, e.fleet.committing = e.staged, e.fleet.committing-1 })
	return &inferencev1.CommitWeightsResponse{Receipt: &weightsv1.WeightsReceipt{Version: in.GetVersion(), Digest: in.GetDigest()}}, nil
}

func (e *engine) PauseEngine(_ context.Context, in *inferencev1.PauseEngineRequest, _ ...grpc.CallOption) (*inferencev1.PauseEngineResponse, error) {
	if in.GetMaxSeconds() == 0 {
		e.fleet.t.Error("a worker was paused for good")
	}
	limit := time.Duration(in.GetMaxSeconds()) * time.Second
	e.do(func() { e.paused, e.until = true, time.Now().Add(limit) })
	time.AfterFunc(limit, func() {
		e.do(func() { e.paused = e.paused && time.Now().Before(e.until) })
	})
	return &inferencev1.PauseEngineResponse{}, nil
}

func (e *engine) ResumeEngine(context.Context, *inferencev1.ResumeEngineRequest, ...grpc.CallOption) (*inferencev1.ResumeEngineResponse, error) {
	e.do(func() { e.paused = false })
	return &inferencev1.ResumeEngineResponse{}, nil
}

// newEngines is a fleet of n workers that follows its wanted weights until the test ends.
func newEngines(t *testing.T, p policy, n int, prepare func(i int, e *engine)) (*fleet, *engines) {
	all := &engines{t: t}
	cfg := &configv1.RunConfig{Weights: &configv1.WeightsConfig{Update: proto.String(string(p))}}
	f := newFleet(settings{runID: run, cfg: cfg}, nil, time.Millisecond, all)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	for i := range n {
		e := &engine{fleet: all, name: fmt.Sprintf("inference-%d", i)}
		if prepare != nil {
			prepare(i, e)
		}
		all.all = append(all.all, e)
		f.workers[e.name] = &inferenceWorker{name: e.name, client: e}
	}
	for _, w := range f.workers {
		wg.Go(func() { f.follow(ctx, w) })
	}
	return f, all
}

func numbered(version uint64) *weightsv1.WeightsManifest {
	return &weightsv1.WeightsManifest{RunId: run, Version: version, Digest: digestAt(version)}
}

// deliverAll delivers the versions 0 to last, and returns how many workers loaded the last one.
func deliverAll(t *testing.T, f *fleet, last uint64) (loaded int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for version := range last + 1 {
		var err error
		if loaded, err = f.deliver(ctx, numbered(version), func([]string, string) {}); err != nil {
			t.Fatalf("version %d: %v", version, err)
		}
	}
	return loaded
}

// eventually waits until the engines are as wanted.
func (e *engines) eventually(what string, is func() bool) {
	e.t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); <-time.After(time.Millisecond) {
		e.mu.Lock()
		ok := is()
		e.mu.Unlock()
		if ok {
			return
		}
	}
	e.t.Fatalf("waited in vain: %s", what)
}

// neverMixed asserts what the policy atomic promises.
func (e *engines) neverMixed(p policy) {
	e.t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	if p == updateAtomic && e.mixed > 0 {
		e.t.Errorf("two versions were served at once, %d times", e.mixed)
	}
}

func TestPoliciesOfUpdates(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		policy policy
		most   int // commits at the same time
	}{{updateInFlight, 0}, {updateRolling, 2}, {updateAtomic, 8}} {
		t.Run(string(c.policy), func(t *testing.T) {
			t.Parallel()
			f, all := newEngines(t, c.policy, 8, nil)
			if got := deliverAll(t, f, 20); got != 8 {
				t.Fatalf("%d of 8 workers loaded the weights", got)
			}
			all.neverMixed(c.policy)
			all.mu.Lock()
			defer all.mu.Unlock()
			if all.most > c.most {
				t.Errorf("%d workers committed at the same time, at most %d should", all.most, c.most)
			}
			for _, e := range all.all {
				if e.version != 20 || e.paused || e.early {
					t.Errorf("%s serves version %d, paused %v; committed before all had staged: %v", e.name, e.version, e.paused, e.early)
				}
			}
		})
	}
}

// A version is announced before it is delivered: workers that have it by then are not waited for.
func TestAnAnnouncedVersionIsDelivered(t *testing.T) {
	t.Parallel()
	for _, p := range []policy{updateInFlight, updateRolling, updateAtomic} {
		f, all := newEngines(t, p, 4, nil)
		for version := range uint64(20) {
			f.setWanted(t.Context(), numbered(version))
			all.eventually("a worker serves the version", func() bool {
				return slices.ContainsFunc(all.all, func(e *engine) bool { return e.version == version && !e.paused })
			})
			f.setWanted(t.Context(), numbered(version))
		}
		deliverAll(t, f, 20)
		all.neverMixed(p)
	}
}

// A worker that fails to stage does not delay the others. It is named, and catches up.
func TestAWorkerThatFailsToStageIsLeftOutAndCatchesUp(t *testing.T) {
	t.Parallel()
	for _, p := range []policy{updateInFlight, updateRolling, updateAtomic} {
		t.Run(string(p), func(t *testing.T) {
			t.Parallel()
			var works sync.Mutex // held: staging fails at inference-2
			f, all := newEngines(t, p, 4, func(i int, e *engine) {
				if i == 2 {
					e.stage = func() error {
						if !works.TryLock() {
							return status.Error(codes.FailedPrecondition, "no space for the weights")
						}
						works.Unlock()
						return nil
					}
				}
			})
			deliverAll(t, f, 0)
			works.Lock()
			if got := deliverAll(t, f, 3); got != 3 {
				t.Fatalf("%d workers loaded the weights, 3 can", got)
			}
			all.mu.Lock()
			out := all.all[2]
			if out.version != 0 || p == updateAtomic && !out.paused {
				t.Errorf("the worker serves version %d, paused %v", out.version, out.paused)
			}
			all.mu.Unlock()
			all.eventually("the worker is named", func() bool { return slices.Equal(all.left, []string{"inference-2"}) })
			works.Unlock()
			all.eventually("the worker catches up", func() bool {
				return out.version == 3 && !out.paused && slices.Equal(all.caught, []string{"inference-2"})
			})
			all.neverMixed(p)
			if got := deliverAll(t, f, 4); got != 4 {
				t.Errorf("%d workers loaded the next version, all 4 can", got)
			}
		})
	}
}

// A worker dies after it has staged: the others commit without it, when the registry has dropped
// it.
func TestAWorkerThatDiesBetweenThePhasesIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	for _, p := range []policy{updateRolling, updateAtomic} {
		t.Run(string(p), func(t *testing.T) {
			t.Parallel()
			died := make(chan struct{})
			var once sync.Once
			f, all := newEngines(t, p, 4, func(i int, e *engine) {
				if i == 1 {
					e.commit = func() error {
						if e.staged == 0 {
							return nil
						}
						once.Do(func() { close(died) })
						return status.Error(codes.Unavailable, "connection refused")
					}
				}
			})
			if got := deliverAll(t, f, 2); got != 3 {
				t.Fatalf("%d workers loaded the weights, 3 live", got)
			}
			<-died
			all.mu.Lock()
			defer all.mu.Unlock()
			for i, e := range all.all {
				if i != 1 && (e.version != 2 || e.paused) {
					t.Errorf("%s serves version %d, paused %v", e.name, e.version, e.paused)
				}
			}
		})
	}
}

// A worker that is slow to stage delays an update in flight for itself only.
func TestASlowWorkerDelaysNoOtherInFlight(t *testing.T) {
	t.Parallel()
	slow := make(chan struct{})
	f, all := newEngines(t, updateInFlight, 3, func(i int, e *engine) {
		if i == 0 {
			e.stage = func() error { <-slow; return nil }
		}
	})
	f.setWanted(t.Context(), numbered(1))
	all.eventually("the others serve the version", func() bool { return all.all[1].version == 1 && all.all[2].version == 1 })
	close(slow)
	deliverAll(t, f, 1)
}

// A worker that is slow to commit, or that can't load the weights for long, does not end the pauses
// of the others or its own.
func TestPausesLastUntilTheAtomicUpdateEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		fails := time.Now().Add(20 * time.Minute)
		f, all := newEngines(t, updateAtomic, 3, func(i int, e *engine) {
			switch i {
			case 0:
				e.commit = func() error { time.Sleep(5 * time.Minute); return nil }
			case 1:
				e.stage = func() error {
					if e.version == 1 && time.Now().Before(fails) {
						time.Sleep(5 * time.Minute)
						return status.Error(codes.FailedPrecondition, "no space for the weights")
					}
					return nil
				}
			}
		})
		if got, err := f.deliver(t.Context(), numbered(1), func([]string, string) {}); err != nil || got != 3 {
			t.Fatalf("%d workers loaded version 1, %v", got, err)
		}
		if got, err := f.deliver(t.Context(), numbered(2), func([]string, string) {}); err != nil || got != 2 {
			t.Fatalf("%d workers loaded version 2, %v", got, err)
		}
		time.Sleep(time.Hour)
		all.neverMixed(updateAtomic)
		all.mu.Lock()
		defer all.mu.Unlock()
		for _, e := range all.all {
			if e.version != 2 || e.paused {
				t.Errorf("%s serves version %d, paused %v", e.name, e.version, e.paused)
			}
		}
	})
}

// The registry drops a worker while it fails: it is not named after that.
func TestADroppedWorkerIsNotLeftOut(t *testing.T) {
	t.Parallel()
	f, all := newEngines(t, updateInFlight, 0, nil)
	w := &inferenceWorker{name: "inference-1", client: &engine{fleet: all, name: "inference-1"}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f.refused(ctx, w, numbered(1), nil, status.Error(codes.Unavailable, "gone"))
	if len(all.left) > 0 || w.left {
		t.Errorf("left out: %v", all.left)
	}
}

// A worker that joins an atomic fleet passes the open gates alone.
func TestAWorkerThatJoinsLaterIsUpdatedAlone(t *testing.T) {
	t.Parallel()
	f, all := newEngines(t, updateAtomic, 2, nil)
	deliverAll(t, f, 5)
	late := &engine{fleet: all, name: "inference-9", paused: true}
	w := &inferenceWorker{name: late.name, client: late}
	all.mu.Lock()
	all.all = append(all.all, late)
	all.mu.Unlock()
	f.mu.Lock()
	f.workers[late.name] = w
	f.broadcast()
	f.mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); f.follow(ctx, w) }()
	defer func() { cancel(); <-done }()
	all.eventually("the worker serves the version", func() bool { return late.version == 5 && !late.paused })
	all.neverMixed(updateAtomic)
}

// The progress names the workers that are left out, and the events name them once each.
func TestLaggingWorkersAreNamed(t *testing.T) {
	t.Parallel()
	bus := &warnings{}
	events := &reporter{settings: settings{runID: run}, bus: bus, now: time.Now}
	l := &lagging{reporter: events, progress: newProgress(events, &learnerv1.Progress{})}
	l.leftOut("inference-1", 4, rpcerr.New(codes.FailedPrecondition, "WEIGHTS_SOURCES_LOST", "no source answers"))
	l.leftOut("inference-2", 4, status.Error(codes.Unavailable, "gone"))
	now, _ := l.progress.read()
	if got := now.GetLagging(); len(got) != 2 || got[0].GetWorkerId() != "inference-1" || got[0].GetVersion() != 4 || got[0].GetMessage() != "no source answers" {
		t.Errorf("lagging: %v", got)
	}
	l.caughtUp("inference-1", numbered(5))
	l.caughtUp("inference-2", nil)
	if now, _ = l.progress.read(); len(now.GetLagging()) != 0 {
		t.Errorf("still lagging: %v", now.GetLagging())
	}
	if got := *bus; len(got) != 2 || got[1].GetKind() != "weights.left_out" || got[1].GetAttributes()["worker"] != "inference-2" {
		t.Errorf("warnings %v", got)
	}
}
