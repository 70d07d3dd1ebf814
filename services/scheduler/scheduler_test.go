package scheduler_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/credential"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/dataset"
	"github.com/rollout-rl/rollout/services/scheduler/issue"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// whole asserts that each position of the plan was consumed by the step of its window, or excluded.
func (w *world) whole(steps uint64) {
	w.t.Helper()
	w.mesh.read(func() {
		first := w.mesh.config.GetFirstPosition()
		for p := first; p < first+(steps-w.mesh.config.GetFirstStep())*3; p++ {
			g := w.mesh.groups[p]
			if g.GetState() != bufferv1.GroupState_GROUP_STATE_CONSUMED && g.GetState() != bufferv1.GroupState_GROUP_STATE_EXCLUDED {
				w.t.Errorf("position %d is %v", p, g)
			}
		}
		if uint64(len(w.mesh.groups)) != (steps-w.mesh.config.GetFirstStep())*3 {
			w.t.Errorf("%d groups were heard of", len(w.mesh.groups))
		}
	})
}

func TestRunSucceeds(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]*planv1.Plan{
		"sync": plan(5, "sync", 0, false), "async": plan(5, "async", 2, false), "sft": plan(5, "sync", 3, true),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := setup(t)
			w.start()
			run := w.create(p)
			status := w.waitState(run.GetRunId(), scheduler.Succeeded)
			w.whole(5)
			w.published(p, run)
			if s := w.events.of("run.state", "state"); !slices.Equal(s, []string{"PENDING", "STARTING", "RUNNING", "DRAINING", "SUCCEEDED"}) {
				t.Errorf("states %v", s)
			}
			w.events.mu.Lock()
			if len(w.events.late) > 0 {
				t.Errorf("the end of the run was reported before these events were stored: %v", w.events.late)
			}
			for _, e := range w.events.all {
				if e.GetAttributes()["state"] == "DRAINING" && e.GetStep() != 5 {
					t.Errorf("it drains at step %d", e.GetStep())
				}
			}
			w.events.mu.Unlock()
			got := status.GetRun()
			if got.GetStep() != 5 || got.GetTotalSteps() != 5 || got.GetWeightsDigest() != "digest-5" || got.GetEndTime() == nil || got.GetName() != "test-run" {
				t.Errorf("record %v", got)
			}
			if q := status.GetQueues(); q.GetConsumed() != 15 || q.GetInFlight()+q.GetReady()+q.GetLeased()+q.GetExcluded() != 0 {
				t.Errorf("queues %v", q)
			}
			if c := status.GetCursor(); c.GetPosition() != 15 || c.GetEpoch() != 2 || c.GetIndex() != 1 || c.GetRows() != rows {
				t.Errorf("cursor %v", c)
			}
			w.generation.stop() // the streams go after the record says how the run ended
			w.mesh.read(func() {
				if w.mesh.streams != "deleted" || w.mesh.open {
					t.Errorf("streams %q, ledger open %v", w.mesh.streams, w.mesh.open)
				}
			})
			if left := w.launcher.processes(); len(left) != 0 {
				t.Errorf("%d workers still run", len(left))
			}
		})
	}
}

// published checks the published work: each position once, with its row in the seeded order, its
// seeds, and the weights that it requires.
func (w *world) published(p *planv1.Plan, run *scheduler.Run) {
	w.t.Helper()
	order := dataset.Order{Seed: 7, Rows: rows, Shuffle: true}
	w.mesh.read(func() {
		for n, g := range w.mesh.published {
			place := dataset.PlaceOf(uint64(n), rows)
			row := order.Row(place)
			min := uint64(0)
			if p.GetConfig().GetMode() == "sync" && p.GetConfig().GetAlgorithm().GetSft() == nil {
				min = uint64(n) / 3
			}
			async := p.GetConfig().GetMode() == "async"
			if g.GetPosition() != uint64(n) || g.GetEpoch() != place.Epoch || g.GetIndex() != place.Index || g.GetRow() != row ||
				string(g.GetRowJson()) != fmt.Sprintf(`{"prompt": "row %d"}`, row) || g.GetGroupSize() != 2 || g.GetAttempt() != 0 ||
				!slices.Equal(g.GetSeeds(), dataset.Seeds(7, place, 2)) || !async && g.GetMinVersion() != min || g.GetRunId() != run.GetRunId() {
				w.t.Errorf("message %d: %v", n, g)
			}
		}
		if len(w.mesh.published) != 15 {
			w.t.Errorf("%d messages", len(w.mesh.published))
		}
	})
}

// dyingBus kills the scheduler at one of its publishes.
type dyingBus struct {
	scheduler.Bus
	left   *int
	before bool
	die    func()
}

func (b dyingBus) Publish(ctx context.Context, messages ...bus.Message) error {
	*b.left--
	if *b.left == 0 && b.before {
		b.die()
	}
	err := b.Bus.Publish(ctx, messages...)
	if *b.left == 0 && !b.before {
		b.die()
	}
	return err
}

// The scheduler is killed after the cursor moved and before the publish, and after the publish, for
// each publish; workers lose what they had pulled. The resumed run loses nothing and repeats
// nothing.
func TestDeathAtEveryPublish(t *testing.T) {
	t.Parallel()
	for mode, publishes := range map[string]int{"sync": 6, "async": 3} {
		for publish := 1; publish <= publishes; publish++ {
			for _, before := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/%d/before=%v", mode, publish, before), func(t *testing.T) {
					t.Parallel()
					staleness := uint32(0)
					if mode == "async" {
						staleness = 1
					}
					w := setup(t)
					died := make(chan struct{})
					left := publish
					w.wrapBus = func(b scheduler.Bus) scheduler.Bus {
						return dyingBus{b, &left, before, func() {
							w.mesh.mu.Lock()
							g := w.mesh.scheduler
							w.mesh.held = true
							w.mesh.mu.Unlock()
							g.gate.close()
							close(died)
						}}
					}
					w.start()
					run := w.create(plan(6, mode, staleness, false)).GetRunId()
					<-died
					w.kill()
					w.wrapBus = nil
					w.mesh.do(func() { w.mesh.queue = nil }) // with the daemon its queue dies; the ledger stays
					w.start()
					w.waitState(run, scheduler.Interrupted)
					w.mesh.do(func() { w.mesh.held = false })
					if _, err := w.generation.ResumeRun(t.Context(), &runv1.ResumeRunRequest{RunId: run}); err != nil {
						t.Fatal(err)
					}
					got := w.waitState(run, scheduler.Succeeded)
					w.whole(6)
					if got.GetRun().GetIncarnation() != 2 {
						t.Errorf("incarnation %d", got.GetRun().GetIncarnation())
					}
				})
			}
		}
	}
}

// The scheduler stops regularly in the middle of a run.
func TestInterruptAndResume(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.outcome = func(g *runv1.PromptGroup) (string, bool) {
		if g.GetPosition() == 7 {
			w.mesh.held = true // the workers stop in mid-run
		}
		return "", false
	}
	w.start()
	run := w.create(plan(6, "async", 1, false)).GetRunId()
	w.wait(run, func(s *runv1.RunStatus) bool {
		return s.GetRun().GetStep() >= 1 && s.GetRun().GetState() == scheduler.Running
	})
	w.generation.stop()
	w.mesh.do(func() { w.mesh.held, w.mesh.outcome = false, nil })
	w.start()
	status := w.waitState(run, scheduler.Interrupted)
	if !strings.Contains(status.GetRun().GetMessage(), "--resume "+run) || status.GetRun().GetEndTime() != nil {
		t.Errorf("record %v", status.GetRun())
	}
	if len(w.launcher.processes()) != 0 {
		t.Error("workers survived")
	}
	if _, err := w.generation.ResumeRun(t.Context(), &runv1.ResumeRunRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	w.waitState(run, scheduler.Succeeded)
	w.whole(6)
}

// A state folder that was moved or copied contains the folders of its runs: a resumed run writes
// there.
func TestMovedStateFolderKeepsItsRuns(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true
	w.start()
	run := w.create(plan(2, "sync", 0, false)).GetRunId()
	before := w.waitState(run, scheduler.Running).GetRun().GetDirectory()
	w.generation.stop()
	if _, err := w.store.Update(t.Context(), run, func(r *scheduler.Run) error {
		r.WeightsDirectory = filepath.Join(before, "weights", "v000001")
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	w.config.StateDir = t.TempDir()
	w.start()
	resumed := w.resume(run)
	folder := filepath.Join(w.config.StateDir, "runs", run)
	if resumed.GetDirectory() != folder || resumed.GetWeightsDirectory() != filepath.Join(folder, "weights", "v000001") {
		t.Errorf("it continues in %s, its weights are in %s", resumed.GetDirectory(), resumed.GetWeightsDirectory())
	}
	w.mesh.do(func() { w.mesh.held = false })
	w.waitState(run, scheduler.Succeeded)
}

// Steps that were committed while the process was being killed are in the ledger alone. A list
// after the restart contains them.
func TestListAfterAKillHasTheStepsOfTheLedger(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true
	w.start()
	run := w.create(plan(6, "sync", 0, false)).GetRunId()
	directory := w.waitState(run, scheduler.Running).GetRun().GetDirectory()
	w.kill()
	weights := filepath.Join(directory, "weights", "v000004")
	if err := os.MkdirAll(weights, 0o700); err != nil {
		t.Fatal(err)
	}
	w.mesh.read(func() { w.mesh.step = 4 })
	w.start()
	list, err := w.generation.ListRuns(t.Context(), &runv1.ListRunsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if got := list.GetRuns()[0]; got.GetState() != scheduler.Interrupted || got.GetStep() != 4 || got.GetWeightsDirectory() != weights || got.GetWeightsDigest() != "digest-4" {
		t.Errorf("listed as %v", got)
	}
}

// If weights were lost and trained again with other bits, the digest in the record of their step is
// that of weights that do not exist any more.
func TestRecordAfterAKillNamesTheRetrainedWeights(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true
	w.start()
	run := w.create(plan(6, "async", 2, false)).GetRunId()
	directory := w.waitState(run, scheduler.Running).GetRun().GetDirectory()
	w.kill()
	if err := os.MkdirAll(filepath.Join(directory, "weights", "v000004"), 0o700); err != nil {
		t.Fatal(err)
	}
	w.mesh.read(func() { w.mesh.step, w.mesh.retrained = 4, "digest-retrained" })
	w.start()
	list, err := w.generation.ListRuns(t.Context(), &runv1.ListRunsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if got := list.GetRuns()[0]; got.GetStep() != 4 || got.GetWeightsDigest() != "digest-retrained" {
		t.Errorf("listed as %v", got)
	}
}

func TestResumeOnStart(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true
	w.start()
	run := w.create(plan(2, "sync", 0, false)).GetRunId()
	w.waitState(run, scheduler.Running)
	w.kill()
	w.config.ResumeOnStart = true
	w.start()
	w.wait(run, func(s *runv1.RunStatus) bool {
		return s.GetRun().GetState() == scheduler.Running && s.GetRun().GetIncarnation() == 2
	})
	w.mesh.do(func() { w.mesh.held = false })
	w.waitState(run, scheduler.Succeeded)
	w.whole(2)
	w.mesh.read(func() {
		if w.mesh.duplicates != 0 {
			t.Errorf("%d groups of the dead incarnation were sampled as well", w.mesh.duplicates)
		}
	})
}

// With ResumeOnStart, each next scheduler continues the run, no matter how often one dies or stops,
// also before it began or while the planner is unavailable. A paused run stays paused.
func TestNextSchedulerContinuesTheRun(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.config.ResumeOnStart = true
	w.mesh.held = true
	w.start()
	run := w.create(plan(2, "sync", 0, false)).GetRunId()
	running := func(incarnation uint32) {
		t.Helper()
		w.wait(run, func(s *runv1.RunStatus) bool {
			return s.GetRun().GetState() == scheduler.Running && s.GetRun().GetIncarnation() == incarnation
		})
	}
	running(1)
	w.generation.stop()
	w.launcher.endAll()
	w.planner.away.Store(2)
	w.start()
	running(2)
	w.kill()
	w.planner.away.Store(1 << 30)
	w.start()
	w.kill() // it had marked nothing
	w.planner.away.Store(0)
	w.start()
	running(3)
	if _, err := w.generation.PauseRun(t.Context(), &runv1.PauseRunRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	w.kill()
	w.start()
	w.wait(run, func(s *runv1.RunStatus) bool {
		return s.GetRun().GetState() == scheduler.Paused && s.GetRun().GetIncarnation() == 4
	})
	if _, err := w.generation.ResumeRun(t.Context(), &runv1.ResumeRunRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	w.mesh.do(func() { w.mesh.held = false })
	w.waitState(run, scheduler.Succeeded)
	w.whole(2)
}

// A store that is unavailable while a run starts, or missing streams, do not fail the run.
func TestPartsAreRestarted(t *testing.T) {
	t.Parallel()
	w := setup(t)
	gone := &goneOnce{}
	w.wrapBus = func(b scheduler.Bus) scheduler.Bus { gone.Bus = b; return gone }
	w.start()
	w.generation.gate.away.Store(2)
	run := w.create(plan(2, "sync", 0, false)).GetRunId()
	w.waitState(run, scheduler.Succeeded)
	w.whole(2)
	if n := gone.opened.Load(); n != 2 {
		t.Errorf("the streams were made %d times", n)
	}
}

// goneOnce is a bus that has lost the streams at the second publish.
type goneOnce struct {
	scheduler.Bus
	published, opened atomic.Int32
}

func (g *goneOnce) EnsureRun(ctx context.Context, run string) error {
	g.opened.Add(1)
	return g.Bus.EnsureRun(ctx, run)
}

func (g *goneOnce) Publish(ctx context.Context, messages ...bus.Message) error {
	if g.published.Add(1) == 2 {
		return bus.ErrNoStream
	}
	return g.Bus.Publish(ctx, messages...)
}

// If the NATS servers have no space for the work, the run shows what it waits for, warns once, and
// continues when there is space.
func TestServersWithoutSpace(t *testing.T) {
	t.Parallel()
	w := setup(t)
	full := &fullBus{refused: make(chan struct{})}
	w.wrapBus = func(b scheduler.Bus) scheduler.Bus { full.Bus = b; return full }
	w.log = slog.New(slog.NewTextHandler(full, nil))
	full.full.Store(true)
	w.start()
	run := w.create(plan(2, "sync", 0, false)).GetRunId()
	w.wait(run, func(s *runv1.RunStatus) bool {
		return strings.Contains(s.GetWaitingFor(), "publishing prompt groups (NATS") && strings.Contains(s.GetWaitingFor(), "are full")
	})
	for range 3 {
		<-full.refused
	}
	full.full.Store(false)
	w.waitState(run, scheduler.Succeeded)
	w.whole(2)
	full.mu.Lock()
	defer full.mu.Unlock()
	if got := full.text.String(); strings.Count(got, "reason=BUS_FULL") != 1 || !strings.Contains(got, "level=WARN") || !strings.Contains(got, "max_file") {
		t.Errorf("log:\n%s", got)
	}
}

// fullBus is a bus of servers without space; it keeps the log of the scheduler.
type fullBus struct {
	scheduler.Bus
	full    atomic.Bool
	refused chan struct{} // one for each refusal that somebody waits for
	mu      sync.Mutex
	text    bytes.Buffer
}

func (f *fullBus) Publish(ctx context.Context, messages ...bus.Message) error {
	if f.full.Load() {
		select {
		case f.refused <- struct{}{}:
		default:
		}
		return bus.ErrFull
	}
	return f.Bus.Publish(ctx, messages...)
}

func (f *fullBus) Write(data []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.text.Write(data)
}

// A group that fails twice is excluded; a group that becomes stale three times is not.
func TestFailedAttempts(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.outcome = func(g *runv1.PromptGroup) (string, bool) {
		switch {
		case g.GetPosition() == 4:
			return "REWARD_TIMEOUT", true
		case g.GetPosition() == 5 && g.GetAttempt() == 0:
			return "REWARD_TIMEOUT", true
		case g.GetPosition() == 6 && g.GetAttempt() < 3:
			return "STALE", false
		}
		return "", false
	}
	w.start()
	run := w.create(plan(4, "sync", 0, false)).GetRunId()
	status := w.waitState(run, scheduler.Succeeded)
	w.whole(4)
	if q := status.GetQueues(); q.GetExcluded() != 1 || q.GetConsumed() != 11 {
		t.Errorf("queues %v", q)
	}
	if got := w.events.of("group.excluded", "group"); !slices.Equal(got, []string{"0/4"}) {
		t.Errorf("excluded %v", got)
	}
	if got := w.events.of("group.excluded", "reason"); !slices.Equal(got, []string{issue.AttemptsExhausted}) {
		t.Errorf("reasons %v", got)
	}
	attempts := map[uint64]int{}
	w.mesh.read(func() {
		for _, g := range w.mesh.published {
			attempts[g.GetPosition()]++
			if first := w.mesh.published[g.GetPosition()]; g.GetPosition() < 3 && !slices.Equal(g.GetSeeds(), first.GetSeeds()) {
				t.Errorf("another attempt has other seeds: %v", g)
			}
		}
	})
	if attempts[4] != 2 || attempts[5] != 2 || attempts[6] != 4 || attempts[7] != 1 {
		t.Errorf("attempts %v", attempts)
	}
}

func TestCrashLoopFailsTheRun(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true
	w.start()
	run := w.create(plan(2, "sync", 0, false)).GetRunId()
	for restarts := range uint32(3) {
		w.wait(run, func(s *runv1.RunStatus) bool {
			for _, worker := range s.GetWorkers() {
				if worker.GetWorkerId() == "inference-0" && worker.GetHealthy() && worker.GetRestarts() == restarts {
					return true
				}
			}
			return false
		})
		w.launcher.crash("inference-0", launch.Exit{Code: 1, LastLines: []string{"Traceback", "OutOfMemoryError"}})
	}
	got := w.waitState(run, scheduler.Failed).GetRun()
	if got.GetReason() != "WORKER_CRASH_LOOP" || !strings.Contains(got.GetMessage(), "inference-0") || !strings.Contains(got.GetMessage(), "OutOfMemoryError") {
		t.Errorf("reason %s, message %q", got.GetReason(), got.GetMessage())
	}
	if got := w.events.of("worker.exited", "exit_code"); !slices.Equal(got, []string{"1", "1", "1"}) {
		t.Errorf("exits %v", got)
	}
	if len(w.events.of("worker.started", "pid")) != 4 || len(w.launcher.processes()) != 0 {
		t.Errorf("starts %v, left %d", w.events.of("worker.started", "worker"), len(w.launcher.processes()))
	}
	w.mesh.do(func() { w.mesh.held = false })
	if _, err := w.generation.ResumeRun(t.Context(), &runv1.ResumeRunRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	if again := w.waitState(run, scheduler.Succeeded).GetRun(); again.GetReason() != "" || again.GetIncarnation() != 2 {
		t.Errorf("after resuming: %v", again)
	}
	w.whole(2)
}

// credentials reports whether the files with the credentials of a worker are for its run and kind,
// and readable by their owner alone.
func credentials(t *testing.T, spec *runv1.WorkerSpec) bool {
	t.Helper()
	for reference, role := range map[string]string{spec.GetToken(): spec.GetKind(), spec.GetPeerToken(): credential.Peer} {
		path, ok := strings.CutPrefix(reference, "file:")
		text, err := os.ReadFile(path)
		info, failed := os.Stat(path)
		claims, _ := credential.Parse(strings.TrimSpace(string(text)))
		if !ok || err != nil || failed != nil || info.Mode().Perm() != 0o600 || claims.Run != spec.GetRunId() || claims.Role != role ||
			claims.Incarnation != spec.GetIncarnation() || (claims.Expires == 0) != (role == credential.Peer) {
			t.Errorf("%s has %q, %v", reference, text, err)
			return false
		}
	}
	return spec.GetToken() == "file:"+spec.GetTokenFile()
}

func TestSpecsOfWorkers(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.outcome = func(g *runv1.PromptGroup) (string, bool) {
		w.mesh.held = g.GetPosition() == 8
		return "", false
	}
	w.start()
	p := plan(4, "async", 1, false)
	workers := uint32(2)
	p.Config.Engine.Workers = &workers
	run := w.create(p)
	w.wait(run.GetRunId(), func(s *runv1.RunStatus) bool {
		healthy := 0
		for _, worker := range s.GetWorkers() {
			if worker.GetHealthy() {
				healthy++
			}
		}
		return healthy == 3 && s.GetRun().GetStep() >= 2
	})
	learner, inference := w.launcher.spec("learner-0", 0), w.launcher.spec("inference-1", 0)
	if learner.GetThreads() != 4 || inference.GetThreads() != 2 || inference.GetKind() != "inference" || !credentials(t, inference) ||
		inference.GetNatsUrl() != "nats://here" || inference.GetIncarnation() != 1 || inference.GetBaseDir() != w.dir ||
		inference.GetInitialWeights() != "" || !proto.Equal(inference.GetPlan().GetConfig(), p.GetConfig()) {
		t.Errorf("spec %v", inference)
	}
	path := filepath.Join(run.GetDirectory(), "workers", "inference-1.json")
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("spec file %v, %v", info, err)
	}
	command := w.launcher.commands[0]
	if command.Args[0] != "worker" || !slices.Contains(command.Env, "HOME=/home") || !slices.Contains(command.Env, "OMP_WAIT_POLICY=PASSIVE") ||
		!strings.HasPrefix(command.Log, filepath.Join(run.GetDirectory(), "workers")) {
		t.Errorf("command %+v", command)
	}
	// A worker that starts in the middle of a run loads the newest weights.
	newest := filepath.Join(run.GetDirectory(), "weights", "v000002")
	if err := os.MkdirAll(newest, 0o700); err != nil {
		t.Fatal(err)
	}
	w.launcher.crash("inference-1", launch.Exit{Code: launch.FencedCode})
	w.wait(run.GetRunId(), func(*runv1.RunStatus) bool { return w.launcher.spec("inference-1", 1) != nil })
	if s := w.launcher.spec("inference-1", 1); s.GetInitialWeights() != newest || s.GetInitialVersion() != 2 {
		t.Errorf("a restarted worker begins with %q, version %d", s.GetInitialWeights(), s.GetInitialVersion())
	}
}
