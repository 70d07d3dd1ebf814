package scheduler_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// keeper keeps the processes of a launcher.
type keeper struct {
	*launcher
	mu    sync.Mutex
	owner map[string]*keptProcess // by process
}

// keptProcess is one owner of a process. It observes and stops nothing once there is another.
type keptProcess struct {
	*process
	keeper *keeper
	ended  chan struct{} // closed when the process has exited
	taken  chan struct{} // closed when there is another owner
}

func (p *keptProcess) Handle() string        { return p.ID() }
func (p *keptProcess) Done() <-chan struct{} { return p.ended }

func (p *keptProcess) Release(time.Duration) {
	select {
	case <-p.taken:
	default:
		p.keeper.own(p.process)
	}
}

func (p *keptProcess) Exit() launch.Exit {
	select {
	case <-p.ended:
		return p.process.Exit()
	case <-p.taken:
		return launch.Exit{}
	}
}

func (p *keptProcess) Stop(grace time.Duration) {
	select {
	case <-p.taken:
	default:
		p.process.Stop(grace)
	}
}

func (k *keeper) own(p *process) *keptProcess {
	k.mu.Lock()
	defer k.mu.Unlock()
	if before := k.owner[p.ID()]; before != nil {
		close(before.taken)
	}
	owner := &keptProcess{p, k, make(chan struct{}), make(chan struct{})}
	k.owner[p.ID()] = owner
	go func() {
		select {
		case <-p.Done():
			k.mu.Lock()
			defer k.mu.Unlock()
			if k.owner[p.ID()] == owner {
				close(owner.ended)
			}
		case <-owner.taken:
		}
	}()
	return owner
}

func (k *keeper) Launch(c launch.Command) (launch.Process, error) {
	p, err := k.launcher.Launch(c)
	if started, ok := p.(*process); ok && c.Keep {
		return k.own(started), err
	}
	return p, err
}

func (k *keeper) Adopt(handle string) (launch.Process, error) {
	for _, p := range k.processes() {
		if p.ID() == handle {
			return k.own(p), nil
		}
	}
	return nil, launch.ErrGone
}

// starts is how often a process was started.
func (l *launcher) starts() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.specs)
}

// allServe reports whether all workers are registered.
func allServe(s *runv1.RunStatus) bool {
	return len(s.GetWorkers()) == 2 && !slices.ContainsFunc(s.GetWorkers(), func(w *runv1.Worker) bool { return w.GetAddress() == "" })
}

// A scheduler that takes over continues the run with its workers, in the same incarnation: nothing
// is started, published, or sampled again. The former one leaves the workers alone when it finds
// out that it does not lead.
func TestSchedulerAdoptsWorkers(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		w := setupAt(t, place(t))
		w.realLauncher = &keeper{launcher: w.launcher, owner: map[string]*keptProcess{}}
		store := w.store
		w.config.ResumeOnStart = true
		w.mesh.held = true
		old, _ := w.lead(store)
		run := w.create(plan(3, "sync", 0, false)).GetRunId()
		w.waitState(run, scheduler.Running)
		w.mesh.until("the groups of the first step", func() bool { return len(w.mesh.queue) == 3 })
		w.wait(run, allServe)
		before := w.launcher.starts()
		token := filepath.Join(w.dir, "runs", run, "workers", "learner-0.token")
		if err := os.WriteFile(token, []byte("expired"), 0o600); err != nil {
			t.Fatal(err)
		}

		successor, _ := w.lead(store)
		status := w.wait(run, allServe)
		for renewed := false; !renewed; <-time.After(time.Millisecond) { // in the second that it takes over
			text, err := os.ReadFile(token)
			renewed = err == nil && strings.HasPrefix(string(text), run+".learner.1.")
		}
		if standing, err := successor.internal.GetStanding(t.Context(), &runv1.GetStandingRequest{RunId: run}); standing.GetIncarnation() != 1 || standing.GetEnded() || err != nil {
			t.Errorf("%v, %v", standing, err)
		}
		old.end(lease.ErrNotLeader)
		if got := status.GetRun(); got.GetIncarnation() != 1 || got.GetState() != scheduler.Running {
			t.Errorf("the run continues as incarnation %d in state %v", got.GetIncarnation(), got.GetState())
		}
		w.mesh.do(func() { w.mesh.held = false })
		w.waitState(run, scheduler.Succeeded)
		w.whole(3)
		if got := w.launcher.starts(); got != before {
			t.Errorf("%d processes were started after the takeover", got-before)
		}
		w.mesh.read(func() {
			if len(w.mesh.published) != 9 {
				t.Errorf("%d groups were published, want 9", len(w.mesh.published))
			}
		})
		w.mesh.until("the workers to be stopped", func() bool { return len(w.launcher.processes()) == 0 })
	})
}

// A worker that exited while no scheduler led is started again. The others continue.
func TestWorkerThatDiedDuringTheTakeoverIsStarted(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.realLauncher = &keeper{launcher: w.launcher, owner: map[string]*keptProcess{}}
	w.config.ResumeOnStart = true
	w.mesh.held = true
	first := w.start()
	run := w.create(plan(3, "sync", 0, false)).GetRunId()
	w.waitState(run, scheduler.Running)
	w.wait(run, allServe)
	first.gate.close() // it dies
	first.end(lease.ErrNotLeader)
	w.launcher.crash("inference-0", launch.Exit{Code: 1})
	w.start()
	w.mesh.do(func() { w.mesh.held = false })
	got := w.waitState(run, scheduler.Succeeded).GetRun()
	if got.GetIncarnation() != 1 {
		t.Errorf("incarnation %d", got.GetIncarnation())
	}
	names := map[string]int{}
	w.launcher.mu.Lock()
	for _, spec := range w.launcher.specs {
		names[spec.GetWorkerId()]++
	}
	w.launcher.mu.Unlock()
	if fmt.Sprint(names) != "map[inference-0:2 learner-0:1]" {
		t.Errorf("started %v", names)
	}
	w.whole(3)
}

// A scheduler that takes over a run that began with the episodes of a snapshot does not store them
// again: those that have ended since would be open forever.
func TestTheEpisodesOfASnapshotAreStoredOnce(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.realLauncher = &keeper{launcher: w.launcher, owner: map[string]*keptProcess{}}
	w.config.ResumeOnStart = true
	w.mesh.held = true
	w.snapshots.snap = &snapshotv1.Snapshot{SnapshotId: "snap-full", RunId: "run-old", Step: 2, Cursor: &runv1.Cursor{Position: 6, Rows: rows}}
	w.planner.set(plan(5, "sync", 0, false))
	first := w.start()
	made, err := w.generation.CreateRun(t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, FromSnapshot: "snap-full"})
	if err != nil {
		t.Fatal(err)
	}
	run := made.GetRun().GetRunId()
	w.waitState(run, scheduler.Running)
	first.gate.close() // it dies
	first.end(lease.ErrNotLeader)
	w.start()
	w.mesh.do(func() { w.mesh.held = false })
	w.waitState(run, scheduler.Succeeded)
	if n := w.snapshots.adopted.Load(); n != 1 {
		t.Errorf("the episodes were stored %d times", n)
	}
}

// A user cancels a run right after the takeover: it is not continued, and its workers are stopped.
func TestCancelDuringTheTakeover(t *testing.T) {
	t.Parallel()
	for _, drain := range []bool{false, true} {
		t.Run(fmt.Sprint("drain ", drain), func(t *testing.T) {
			t.Parallel()
			w := setup(t)
			w.realLauncher = &keeper{launcher: w.launcher, owner: map[string]*keptProcess{}}
			w.config.ResumeOnStart = true
			w.mesh.held = true
			first := w.start()
			run := w.create(plan(3, "sync", 0, false)).GetRunId()
			w.waitState(run, scheduler.Running)
			first.gate.close()
			first.end(lease.ErrNotLeader)
			w.start()
			if _, err := w.generation.CancelRun(t.Context(), &runv1.CancelRunRequest{RunId: run, Drain: drain}); err != nil {
				t.Fatal(err)
			}
			w.waitState(run, scheduler.Cancelled)
			w.mesh.until("the workers to be stopped", func() bool { return len(w.launcher.processes()) == 0 })
		})
	}
}

// A worker that was taken by the scheduler that leads is no concern of the one that led, which has
// not found out: when the worker crashes, in the same incarnation, one process is started, and the
// run records one restart.
func TestATakenWorkerIsStartedByItsOwnerAlone(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.realLauncher = &keeper{launcher: w.launcher, owner: map[string]*keptProcess{}}
	store := w.store
	w.config.ResumeOnStart = true
	w.mesh.held = true
	old, _ := w.lead(store)
	run := w.create(plan(3, "sync", 0, false)).GetRunId()
	w.waitState(run, scheduler.Running)
	w.wait(run, allServe)
	before := w.launcher.starts()
	successor, _ := w.lead(store)
	w.wait(run, allServe)
	for {
		standing, err := successor.internal.GetStanding(t.Context(), &runv1.GetStandingRequest{RunId: run})
		if err == nil && standing.GetIncarnation() == 1 {
			break
		}
		<-time.After(time.Millisecond)
	}
	w.launcher.crash("inference-0", launch.Exit{Code: 1})
	restarts := func(s *runv1.RunStatus) (all uint32) {
		for _, worker := range s.GetWorkers() {
			all += worker.GetRestarts()
		}
		return all
	}
	w.wait(run, func(s *runv1.RunStatus) bool { return restarts(s) == 1 && allServe(s) })
	old.end(lease.ErrNotLeader)
	w.mesh.do(func() { w.mesh.held = false })
	got := w.waitState(run, scheduler.Succeeded)
	if n := w.launcher.starts() - before; n != 1 || got.GetRun().GetIncarnation() != 1 {
		t.Errorf("%d processes were started after the crash, in incarnation %d", n, got.GetRun().GetIncarnation())
	}
}
