package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/launch/local"
	"github.com/rollout-rl/rollout/services/scheduler/storetest"
)

// idle gives a world whose run has started and whose workers do nothing.
func idle(t *testing.T, p *planv1.Plan) (*world, string) {
	t.Helper()
	w := setup(t)
	w.mesh.held = true
	w.start()
	run := w.create(p).GetRunId()
	w.wait(run, func(s *runv1.RunStatus) bool {
		return s.GetRun().GetState() == scheduler.Running && s.GetQueues().GetInFlight() > 0 && s.GetWaitingFor() == ""
	})
	return w, run
}

func TestCancelAtOnce(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	for range 2 {
		got, err := w.generation.CancelRun(t.Context(), &runv1.CancelRunRequest{RunId: run})
		if err != nil || got.GetRun().GetState() != scheduler.Cancelled || got.GetRun().GetEndTime() == nil {
			t.Fatalf("got %v, %v", got, err)
		}
	}
	got := w.waitState(run, scheduler.Cancelled).GetRun()
	if got.GetStep() != 0 || got.GetEndTime() == nil || len(w.launcher.processes()) != 0 {
		t.Errorf("record %v, %d workers", got, len(w.launcher.processes()))
	}
	w.mesh.read(func() {
		if len(w.mesh.queue) != 0 || w.mesh.open || w.mesh.streams != "there" {
			t.Errorf("%d groups in the work stream, ledger open %v, streams %q", len(w.mesh.queue), w.mesh.open, w.mesh.streams)
		}
	})
	w.mesh.do(func() { w.mesh.held = false })
	if _, err := w.generation.ResumeRun(t.Context(), &runv1.ResumeRunRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	w.waitState(run, scheduler.Succeeded)
	w.whole(4)
}

func TestCancelWithDrain(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	for range 2 {
		got, err := w.generation.CancelRun(t.Context(), &runv1.CancelRunRequest{RunId: run, Drain: true})
		if err != nil || got.GetRun().GetState() == scheduler.Running {
			t.Fatalf("got %v, %v", got, err)
		}
	}
	got := w.waitState(run, scheduler.Cancelled).GetRun()
	if !strings.Contains(got.GetMessage(), "after step 0") {
		t.Errorf("message %q", got.GetMessage())
	}
	if s := w.events.of("run.state", "state"); !slices.Equal(s[len(s)-2:], []string{"DRAINING", "CANCELLED"}) {
		t.Errorf("states %v", s)
	}
}

// While workers load the model no step has begun, so a cancel with drain ends the run at once.
func TestCancelWhileStarting(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held, w.mesh.begins = true, learnerv1.Phase_PHASE_PREPARING
	w.start()
	run := w.create(plan(4, "sync", 0, false)).GetRunId()
	w.waitState(run, scheduler.Starting)
	answer, err := w.generation.CancelRun(t.Context(), &runv1.CancelRunRequest{RunId: run, Drain: true})
	if err != nil || answer.GetRun().GetState() != scheduler.Cancelled {
		t.Fatalf("got %v, %v", answer, err)
	}
	got := w.waitState(run, scheduler.Cancelled).GetRun()
	if states := w.events.of("run.state", "state"); slices.Contains(states, "DRAINING") || got.GetStep() != 0 || !strings.Contains(got.GetMessage(), "while it started") {
		t.Errorf("states %v, record %v", states, got)
	}
}

// A status with what is in flight has the waits of the gateway too, also if the gateway has to ask
// the scheduler for the run first.
func TestTheGatewayIsAskedForItsWaits(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	w.erased.asks = func() {
		if _, err := w.generation.GetRun(t.Context(), &runv1.GetRunRequest{RunId: run}); err != nil {
			t.Error(err)
		}
	}
	for inFlight, want := range map[bool]bool{true: true, false: false} {
		got, err := w.generation.GetRun(t.Context(), &runv1.GetRunRequest{RunId: run, InFlight: inFlight})
		if err != nil {
			t.Fatal(err)
		}
		named := slices.ContainsFunc(got.GetStatus().GetWaits(), func(w *waitv1.Wait) bool { return w.GetReason() == "NO_AGENT" })
		if named != want {
			t.Errorf("in flight %v: %v", inFlight, got.GetStatus().GetWaits())
		}
	}
}

func TestPauseStopsIssuing(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	for range 2 {
		got, err := w.generation.PauseRun(t.Context(), &runv1.PauseRunRequest{RunId: run})
		if err != nil || got.GetRun().GetState() != scheduler.Paused {
			t.Fatalf("got %v, %v", got, err)
		}
	}
	w.mesh.do(func() { w.mesh.held = false }) // the window that was issued is consumed
	status := w.wait(run, func(s *runv1.RunStatus) bool { return s.GetRun().GetStep() == 1 })
	if !strings.Contains(status.GetWaitingFor(), "resume") || status.GetRun().GetState() != scheduler.Paused {
		t.Errorf("status %v", status)
	}
	w.mesh.read(func() {
		if len(w.mesh.published) != 3 {
			t.Errorf("%d groups were issued", len(w.mesh.published))
		}
	})
	if len(w.launcher.processes()) != 2 {
		t.Errorf("%d workers", len(w.launcher.processes()))
	}
	if _, err := w.generation.ResumeRun(t.Context(), &runv1.ResumeRunRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	if got := w.waitState(run, scheduler.Succeeded).GetRun(); got.GetIncarnation() != 1 {
		t.Errorf("incarnation %d", got.GetIncarnation())
	}
	w.whole(4)
	for name, call := range map[string]func() error{
		"resume": func() error {
			_, err := w.generation.ResumeRun(t.Context(), &runv1.ResumeRunRequest{RunId: run})
			return err
		},
		"pause": func() error {
			_, err := w.generation.PauseRun(t.Context(), &runv1.PauseRunRequest{RunId: run})
			return err
		},
	} {
		if reason := rpcerr.Reason(call()); reason != map[string]string{"resume": "RUN_NOT_RESUMABLE", "pause": "RUN_NOT_PAUSABLE"}[name] {
			t.Errorf("%s of a run that succeeded: %q", name, reason)
		}
		if err := call(); !strings.Contains(err.Error(), run) || rpcerr.Fix(err) == "" {
			t.Errorf("%s of a run that succeeded says %q, fix %q", name, err, rpcerr.Fix(err))
		}
	}
}

// A full disk pauses the run until there is space again, unless it was paused by request as well.
func TestDiskFullPausesTheRun(t *testing.T) {
	t.Parallel()
	for name, asked := range map[string]bool{"by itself": false, "paused by request too": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, run := idle(t, plan(4, "sync", 0, false))
			w.mesh.do(func() { w.mesh.stalled = "DISK_FULL" })
			status := w.waitState(run, scheduler.Paused)
			if status.GetRun().GetReason() != "DISK_FULL" || !strings.Contains(status.GetWaitingFor(), "DISK_FULL") {
				t.Errorf("status %v", status)
			}
			if asked {
				if _, err := w.generation.PauseRun(t.Context(), &runv1.PauseRunRequest{RunId: run}); err != nil {
					t.Fatal(err)
				}
			}
			w.mesh.do(func() { w.mesh.stalled, w.mesh.held = "", false })
			if asked {
				status := w.wait(run, func(s *runv1.RunStatus) bool { return s.GetRun().GetStep() == 1 })
				if status.GetRun().GetState() != scheduler.Paused || status.GetRun().GetReason() != "" {
					t.Errorf("status %v", status)
				}
				if _, err := w.generation.ResumeRun(t.Context(), &runv1.ResumeRunRequest{RunId: run}); err != nil {
					t.Fatal(err)
				}
			}
			if got := w.waitState(run, scheduler.Succeeded).GetRun(); got.GetReason() != "" {
				t.Errorf("reason %s", got.GetReason())
			}
			w.whole(4)
		})
	}
}

// A controller that waits for space on the disk pauses the run. The wait names the user as its
// owner and says what to do.
func TestControllerWithoutSpacePausesTheRun(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	report := func(noRoom string) func() {
		return func() {
			w.mesh.noRoom = noRoom
			w.mesh.report(learnerv1.Phase_PHASE_LEASING, nil)
		}
	}
	w.mesh.do(report("the next snapshot needs 2.0 GiB"))
	status := w.waitState(run, scheduler.Paused)
	r := status.GetRun()
	if r.GetReason() != rpcerr.ReasonDiskFull || r.GetMessage() != "space on the disk: the next snapshot needs 2.0 GiB" || len(status.GetWaits()) != 1 {
		t.Fatalf("status %v", status)
	}
	if wait := status.GetWaits()[0]; wait.GetOwner() != "user" || wait.GetReason() != rpcerr.ReasonDiskFull || wait.GetFix() == "" || wait.GetSince() == nil {
		t.Errorf("wait %v", wait)
	}
	w.mesh.do(func() { report("")(); w.mesh.held = false })
	if got := w.waitState(run, scheduler.Succeeded).GetRun(); got.GetReason() != "" {
		t.Errorf("reason %s", got.GetReason())
	}
	w.whole(4)
}

// While no database can be written, a run shows why it waits, can be cancelled, and does not fail;
// its end is recorded when there is space.
func TestFullDatabase(t *testing.T) {
	t.Parallel()
	full := func(s *runv1.RunStatus) bool {
		return slices.ContainsFunc(s.GetWaits(), func(w *waitv1.Wait) bool { return w.GetReason() == rpcerr.ReasonDiskFull && w.GetFix() != "" })
	}
	for name, cancel := range map[string]*runv1.CancelRunRequest{"continued": nil, "cancelled": {}, "drained": {Drain: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, run := idle(t, plan(4, "sync", 0, false))
			w.generation.gate.full.Store(true)
			w.mesh.do(func() { w.mesh.stalled = rpcerr.ReasonDiskFull })
			w.wait(run, full)
			if cancel != nil {
				cancel.RunId = run
				if _, err := w.generation.CancelRun(t.Context(), cancel); err != nil {
					t.Fatal(err)
				}
				w.wait(run, full)
			}
			w.generation.gate.full.Store(false)
			w.mesh.do(func() { w.mesh.stalled, w.mesh.held = "", false })
			if cancel != nil {
				w.waitState(run, scheduler.Cancelled)
				return
			}
			w.waitState(run, scheduler.Succeeded)
			w.whole(4)
		})
	}
}

// A run whose record cannot be written when it begins, for lack of space or because the database
// fails over, begins later.
func TestARunBeginsWhenItsRecordCanBeWritten(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	w.generation.gate.full.Store(true)
	run := w.create(plan(1, "sync", 0, false)).GetRunId()
	w.wait(run, func(s *runv1.RunStatus) bool {
		return slices.ContainsFunc(s.GetWaits(), func(w *waitv1.Wait) bool { return w.GetReason() == rpcerr.ReasonDiskFull })
	})
	w.generation.gate.full.Store(false)
	w.waitState(run, scheduler.Succeeded)
}

// The next scheduler knows that the run is paused because of a full disk, and continues it when
// there is space.
func TestDiskFullOutlivesTheScheduler(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	w.mesh.do(func() { w.mesh.stalled = "DISK_FULL" })
	w.waitState(run, scheduler.Paused)
	w.kill()
	w.config.ResumeOnStart = true
	w.start()
	w.wait(run, func(s *runv1.RunStatus) bool { return s.GetRun().GetIncarnation() == 2 })
	w.mesh.do(func() { w.mesh.stalled, w.mesh.held = "", false })
	w.waitState(run, scheduler.Succeeded)
	w.whole(4)
}

func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true
	w.start()
	w.planner.set(plan(2, "sync", 0, false))
	req := &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, IdempotencyKey: "once"}
	first, err := w.generation.CreateRun(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	again, err := w.generation.CreateRun(t.Context(), req)
	if err != nil || again.GetRun().GetRunId() != first.GetRun().GetRunId() || w.planner.asked != 1 {
		t.Fatalf("a repeat made %v, %v", again, err)
	}
	list, err := w.generation.ListRuns(t.Context(), &runv1.ListRunsRequest{})
	if err != nil || len(list.GetRuns()) != 1 {
		t.Fatalf("runs %v, %v", list, err)
	}
}

func TestRunsAreListedPageByPage(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true
	w.start()
	w.planner.set(plan(2, "sync", 0, false))
	for _, key := range []string{"a", "b"} {
		if _, err := w.generation.CreateRun(t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, IdempotencyKey: key}); err != nil {
			t.Fatal(err)
		}
	}
	first, err := w.generation.ListRuns(t.Context(), &runv1.ListRunsRequest{PageSize: 1})
	if err != nil || len(first.GetRuns()) != 1 || first.GetNextPageToken() == "" {
		t.Fatalf("got %v, %v", first, err)
	}
	second, err := w.generation.ListRuns(t.Context(), &runv1.ListRunsRequest{PageSize: 1, PageToken: first.GetNextPageToken()})
	if err != nil || len(second.GetRuns()) != 1 || second.GetNextPageToken() != "" || second.GetRuns()[0].GetRunId() == first.GetRuns()[0].GetRunId() {
		t.Fatalf("got %v, %v", second, err)
	}
	_, err = w.generation.ListRuns(t.Context(), &runv1.ListRunsRequest{PageToken: "2"})
	e, _ := rpcerr.From(err)
	if rpcerr.Code(err) != codes.InvalidArgument || len(e.Violations()) != 1 || e.Violations()[0].Path != "page_token" {
		t.Errorf("an invalid token: %v", err)
	}
}

// A key sees, lists, and controls the runs of its project only, under any name of them.
func TestAKeySeesTheRunsOfItsProject(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.mesh.held = true
	w.start()
	w.planner.set(plan(2, "sync", 0, false))
	as := func(project string) context.Context {
		return apikey.With(t.Context(), &apikey.Record{Name: "key", Scope: "admin", Project: project})
	}
	create := func(ctx context.Context, project, key string) *runv1.Run {
		t.Helper()
		made, err := w.generation.CreateRun(ctx, &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, Project: project, IdempotencyKey: key})
		if err != nil {
			t.Fatal(err)
		}
		return made.GetRun()
	}
	math, code, plain := create(as("math"), "", "k"), create(t.Context(), "code", "k"), create(as(""), "", "k")
	if math.GetProject() != "math" || code.GetProject() != "code" || plain.GetProject() != "" || math.GetRunId() == code.GetRunId() || plain.GetRunId() == math.GetRunId() {
		t.Fatalf("projects %q, %q, %q", math.GetProject(), code.GetProject(), plain.GetProject())
	}
	if again := create(as("math"), "math", "k"); again.GetRunId() != math.GetRunId() {
		t.Errorf("a repeat made %s", again.GetRunId())
	}
	if _, err := w.generation.CreateRun(as("math"), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, Project: "code"}); !errors.Is(err, apikey.ErrProject) {
		t.Errorf("a run in another project: %v", err)
	}
	ids := func(ctx context.Context, project *string) (out []string) {
		t.Helper()
		list, err := w.generation.ListRuns(ctx, &runv1.ListRunsRequest{Project: project})
		if err != nil {
			t.Fatal(err)
		}
		for _, run := range list.GetRuns() {
			out = append(out, run.GetRunId())
		}
		slices.Sort(out)
		return out
	}
	for name, c := range map[string]struct {
		ctx     context.Context
		project *string
		want    []string
	}{
		"no key": {t.Context(), nil, []string{math.GetRunId(), code.GetRunId(), plain.GetRunId()}}, "no key, of code": {t.Context(), proto.String("code"), []string{code.GetRunId()}},
		"math": {as("math"), nil, []string{math.GetRunId()}}, "math, of code": {as("math"), proto.String("code"), nil},
		"default": {as(""), nil, []string{plain.GetRunId()}}, "no key, of default": {t.Context(), proto.String(""), []string{plain.GetRunId()}},
	} {
		slices.Sort(c.want)
		if got := ids(c.ctx, c.project); !slices.Equal(got, c.want) {
			t.Errorf("%s lists %q, want %q", name, got, c.want)
		}
	}
	if got, err := w.generation.GetRun(as("math"), &runv1.GetRunRequest{RunId: math.GetName()}); err != nil || got.GetStatus().GetRun().GetRunId() != math.GetRunId() {
		t.Errorf("by name: %v, %v", got.GetStatus().GetRun().GetRunId(), err)
	}
	id := code.GetRunId()
	for name, call := range map[string]func(ctx context.Context) error{
		"GetRun": func(ctx context.Context) error {
			_, err := w.generation.GetRun(ctx, &runv1.GetRunRequest{RunId: id})
			return err
		},
		"CancelRun": func(ctx context.Context) error {
			_, err := w.generation.CancelRun(ctx, &runv1.CancelRunRequest{RunId: id})
			return err
		},
		"PauseRun": func(ctx context.Context) error {
			_, err := w.generation.PauseRun(ctx, &runv1.PauseRunRequest{RunId: id})
			return err
		},
		"ResumeRun": func(ctx context.Context) error {
			_, err := w.generation.ResumeRun(ctx, &runv1.ResumeRunRequest{RunId: id})
			return err
		},
		"DeleteRun": func(ctx context.Context) error {
			_, err := w.generation.DeleteRun(ctx, &runv1.DeleteRunRequest{RunId: id})
			return err
		},
	} {
		if err := call(as("math")); rpcerr.Code(err) != codes.NotFound || rpcerr.Reason(err) != "RUN_NOT_FOUND" {
			t.Errorf("%s of another project: %v", name, err)
		}
	}
	if got := ids(t.Context(), proto.String("code")); len(got) != 1 {
		t.Errorf("the run of another project: %q", got)
	}
}

func TestChangedInputsAreRefusedOneByOne(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	w.planner.set(plan(2, "sync", 0, false))
	w.planner.problems = []*planv1.Problem{
		{Reason: "INPUT_CHANGED", File: "train.jsonl", Message: "the training data changed.", Fix: "Restore it."},
		{Reason: "PACKAGE_CHANGED", Field: "packages.torch", Message: "another torch is installed."},
	}
	_, err := w.generation.CreateRun(t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir})
	e, _ := rpcerr.From(err)
	if !errors.Is(err, scheduler.ErrPlanChanged) || len(e.Violations()) != 2 || e.Violations()[0].Path != "train.jsonl" ||
		e.Violations()[0].Description != "the training data changed." ||
		!strings.HasPrefix(err.Error(), "2 inputs of the plan have changed") || !strings.Contains(rpcerr.Fix(err), "rollout plan") || e.Violations()[1].Path != "packages.torch" {
		t.Fatalf("got %v, %v", err, e.Violations())
	}
	w.planner.plan = nil
	if _, err := w.generation.CreateRun(t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir}); !errors.Is(err, scheduler.ErrPlanUnreadable) {
		t.Fatalf("got %v", err)
	}
	if list, err := w.generation.ListRuns(t.Context(), &runv1.ListRunsRequest{}); err != nil || len(list.GetRuns()) != 0 {
		t.Fatalf("runs %v, %v", list, err)
	}
}

// A run whose inputs have changed cannot be resumed, because its ledger records what it consumed.
// The error names the alternative.
func TestResumeWithChangedInputsNamesTheAlternative(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	if _, err := w.generation.CancelRun(t.Context(), &runv1.CancelRunRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	w.waitState(run, scheduler.Cancelled)
	w.planner.problems = []*planv1.Problem{{Reason: "INPUT_CHANGED", File: "reward.py", Message: "the source of the reward changed"}}
	_, err := w.generation.ResumeRun(t.Context(), &runv1.ResumeRunRequest{RunId: run})
	if !errors.Is(err, scheduler.ErrPlanChanged) || !strings.Contains(rpcerr.Fix(err), "`rollout run --resume "+run+" --accept-changes`") {
		t.Fatalf("got %v; fix %q", err, rpcerr.Fix(err))
	}
}

func TestDatasetThatChangedFailsTheRun(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	if err := os.WriteFile(filepath.Join(w.dir, "train.jsonl"), []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := w.waitState(w.create(plan(2, "sync", 0, false)).GetRunId(), scheduler.Failed).GetRun()
	if got.GetReason() != "DATASET_CHANGED" || !strings.Contains(got.GetMessage(), "train.jsonl") {
		t.Fatalf("record %v", got)
	}
}

// A run that starts from a snapshot continues at its position and step.
func TestRestoredRun(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	w.snapshots.snap = &snapshotv1.Snapshot{
		SnapshotId: "snap-full", RunId: "run-old", Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Step: 2,
		Cursor: &runv1.Cursor{Position: 6, Rows: rows},
	}
	w.planner.set(plan(5, "sync", 0, false))
	made, err := w.generation.CreateRun(t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, FromSnapshot: "snap-f"})
	if err != nil || made.GetRun().GetFromSnapshot() != "snap-full" || made.GetRun().GetStep() != 2 {
		t.Fatalf("made %v, %v", made, err)
	}
	run := made.GetRun().GetRunId()
	status := w.waitState(run, scheduler.Succeeded)
	w.whole(5)
	if q := status.GetQueues(); q.GetConsumed() != 9 || q.GetInFlight() != 0 {
		t.Errorf("queues %v", q)
	}
	w.mesh.read(func() {
		if c := w.mesh.config; c.GetFirstPosition() != 6 || c.GetFirstStep() != 2 {
			t.Errorf("ledger %v", c)
		}
		if g := w.mesh.published[0]; g.GetPosition() != 6 || g.GetMinVersion() != 2 || len(w.mesh.published) != 9 {
			t.Errorf("the first of %d groups: %v", len(w.mesh.published), g)
		}
		if w.mesh.request.GetFromSnapshot() != "snap-full" {
			t.Errorf("controller was asked %v", w.mesh.request)
		}
	})
	if got := w.snapshots.pinned; !slices.Equal(got, []string{"snap-full"}) {
		t.Errorf("kept from retention: %v", got)
	}
	ppo, lora := plan(5, "sync", 0, false), plan(5, "sync", 0, false)
	ppo.Config.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Ppo{Ppo: &configv1.PpoConfig{}}}
	lora.Config.Lora = &configv1.LoraConfig{}
	for _, c := range []struct {
		plan  *planv1.Plan
		holds string
		want  string
	}{
		{ppo, "weights/model.safetensors", "has no critic"},
		{ppo, "critic.safetensors", ""},
		{lora, "weights/model.safetensors", "has no adapters"},
		{lora, "adapter/adapter_model.safetensors", ""},
		{plan(5, "sync", 0, false), "adapter/adapter_model.safetensors", "has adapters"},
		{plan(5, "sync", 0, false), "critic.safetensors", ""},
	} {
		w.planner.set(c.plan)
		w.snapshots.snap.Files = []*snapshotv1.SnapshotFile{{Path: c.holds}}
		_, err = w.generation.CreateRun(t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, FromSnapshot: "snap-f"})
		if (err == nil) != (c.want == "") || err != nil && (!errors.Is(err, scheduler.ErrSnapshotKind) || !strings.Contains(err.Error(), c.want) || !strings.Contains(rpcerr.Fix(err), "--from snap-full`, without --continue")) {
			t.Errorf("%s for %v: %v", c.holds, c.plan.GetConfig().GetAlgorithm(), err)
		}
	}
	// Settings that the training state depends on are compared with those of its run.
	for _, c := range []struct {
		change func(*configv1.RunConfig)
		want   string
	}{
		{func(c *configv1.RunConfig) { c.Model = &configv1.ModelConfig{Dtype: proto.String("bfloat16")} }, "has weights in float32, and `model.dtype` of the plan is bfloat16"},
		{func(c *configv1.RunConfig) { c.Lora.Rank = proto.Uint32(16) }, "has adapters of rank 8, and `lora.rank` of the plan is 16"},
		{func(c *configv1.RunConfig) { c.Lora.Dora = proto.Bool(true) }, "has `lora.dora = false`, and the plan has true"},
		{func(c *configv1.RunConfig) { c.Lora.Alpha = proto.Float64(64) }, ""},
	} {
		of := func() *planv1.Plan {
			p := plan(5, "sync", 0, false)
			p.Config.Model = &configv1.ModelConfig{Dtype: proto.String("float32")}
			p.Config.Lora = &configv1.LoraConfig{Rank: proto.Uint32(8)}
			return p
		}
		changed := of()
		c.change(changed.GetConfig())
		w.planner.set(changed)
		w.snapshots.snap.Files = []*snapshotv1.SnapshotFile{{Path: "adapter/adapter_model.safetensors"}}
		w.snapshots.snap.Origin = &snapshotv1.Origin{Plan: of()}
		_, err = w.generation.CreateRun(t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, FromSnapshot: "snap-f"})
		if (err == nil) != (c.want == "") || err != nil && (!errors.Is(err, scheduler.ErrSnapshotKind) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("want %q: %v", c.want, err)
		}
	}
	w.snapshots.snap.Files, w.snapshots.snap.Origin = nil, nil
	w.planner.set(plan(5, "sync", 0, false))
	w.snapshots.snap.Step = 5
	_, err = w.generation.CreateRun(t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, FromSnapshot: "snap-f"})
	if !errors.Is(err, scheduler.ErrNothingToDo) || !strings.Contains(rpcerr.Fix(err), "--from snap-full") {
		t.Fatalf("a run without steps: %v; %s", err, rpcerr.Fix(err))
	}
	passes := plan(5, "sync", 0, false)
	passes.Config.Train.Epochs = proto.Float64(2)
	w.planner.set(passes)
	w.snapshots.snap.Step = 10
	_, err = w.generation.CreateRun(t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, FromSnapshot: "snap-f"})
	if !errors.Is(err, scheduler.ErrNothingToDo) || !strings.Contains(rpcerr.Fix(err), "raise `train.epochs` above 4, which counts from the first step") {
		t.Fatalf("a run without epochs: %v; %s", err, rpcerr.Fix(err))
	}
}

func TestFailureOfTheControllerFailsTheRun(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	for _, end := range []*runv1.CompleteRunRequest{
		{RunId: run, Fence: fencetest.Controller(0, 1), State: scheduler.Succeeded},
		{RunId: run, Fence: fencetest.Controller(1, 1), State: scheduler.Failed, Reason: "REPLAY_DIVERGED", Message: "step 3"},
		{RunId: run, Fence: fencetest.Controller(1, 1), State: scheduler.Succeeded},
	} {
		if _, err := w.generation.internal.CompleteRun(t.Context(), end); err != nil {
			t.Fatal(err)
		}
	}
	if got := w.waitState(run, scheduler.Failed).GetRun(); got.GetReason() != "REPLAY_DIVERGED" || got.GetMessage() != "step 3" {
		t.Fatalf("record %v", got)
	}
	cursor, err := w.generation.internal.GetCursor(t.Context(), &runv1.GetCursorRequest{RunId: run})
	if err != nil || !proto.Equal(cursor.GetCursor(), &runv1.Cursor{Position: 3, Index: 3, Rows: rows}) {
		t.Fatalf("cursor %v, %v", cursor, err)
	}
}

// A controller is suspended before it reports the end of a run, and continues when another one
// drives the run: its report is refused, and the run continues.
func TestAFormerControllerEndsNoRun(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	report := func(epoch uint64, state scheduler.State) error {
		_, err := w.generation.internal.CompleteRun(t.Context(), &runv1.CompleteRunRequest{
			RunId: run, Fence: fencetest.Controller(1, epoch), State: state, Reason: "EXPLODING_GRADIENT", Message: "step 1",
		})
		return err
	}
	if err := w.store.Admit(t.Context(), run, fencetest.Controller(1, 2)); err != nil {
		t.Fatal(err)
	}
	for _, state := range []scheduler.State{scheduler.Failed, scheduler.Paused, scheduler.Succeeded} {
		if err := report(1, state); !fence.Refused(err) {
			t.Errorf("a former controller reports %s: %v", state, err)
		}
	}
	if got, err := w.store.Get(t.Context(), run); err != nil || got.GetState() != scheduler.Running && got.GetState() != scheduler.Starting {
		t.Errorf("record %v, %v", got, err)
	}
	if err := report(2, scheduler.Failed); err != nil {
		t.Fatal(err)
	}
	w.waitState(run, scheduler.Failed)
}

// The local launcher starts a script that fails like a worker.
func TestCrashLoopOfARealProcess(t *testing.T) {
	t.Parallel()
	w := setup(t)
	script := filepath.Join(w.dir, "worker.sh")
	text := "#!/bin/sh\n[ \"$1\" = learner ] && exec cat\necho loading \"$1\"\necho 'ValueError: no tokenizer here' >&2\nexit 1\n"
	if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	w.config.Worker.Command, w.config.Worker.Env = []string{"/bin/sh", script}, os.Environ()
	w.realLauncher, w.mesh.held = local.Launcher{}, true
	w.start()
	run := w.create(plan(2, "sync", 0, false))
	got := w.waitState(run.GetRunId(), scheduler.Failed).GetRun()
	if got.GetReason() != "WORKER_CRASH_LOOP" || !strings.Contains(got.GetMessage(), "inference-0 crashed 3 times") ||
		!strings.Contains(got.GetMessage(), "loading inference\n  ValueError: no tokenizer here") {
		t.Fatalf("reason %s, message %q", got.GetReason(), got.GetMessage())
	}
	if lines := w.events.of("worker.exited", "last_lines"); lines[0] != "loading inference\nValueError: no tokenizer here" {
		t.Errorf("last lines %q", lines)
	}
	log, err := os.ReadFile(filepath.Join(run.GetDirectory(), "workers", "inference-0.log"))
	if err != nil || strings.Count(string(log), "loading") != 3 {
		t.Errorf("log %q, %v", log, err)
	}
}

// workerConn answers GetInferenceStatus.
type workerConn struct {
	grpc.ClientConnInterface
	asked chan string
	addr  string
}

func (c workerConn) Invoke(_ context.Context, method string, _, reply any, _ ...grpc.CallOption) error {
	c.asked <- c.addr
	proto.Merge(reply.(proto.Message), &inferencev1.GetInferenceStatusResponse{
		Receipt: &weightsv1.WeightsReceipt{Version: 3}, SamplesPerSecond: 42, TokensPerSecond: 1000, Activity: "samples 12 sequences",
	})
	return nil
}

func (workerConn) Close() error { return nil }

func TestStatusAsksTheWorkers(t *testing.T) {
	t.Parallel()
	w := setup(t)
	asked := make(chan string, 1000)
	w.dial = func(_ string, _ uint32, address string) (scheduler.Conn, error) {
		return workerConn{asked: asked, addr: address}, nil
	}
	w.mesh.held = true
	w.start()
	run := w.create(plan(2, "sync", 0, false)).GetRunId()
	status := w.wait(run, func(s *runv1.RunStatus) bool {
		return len(s.GetWorkers()) == 2 && s.GetWorkers()[0].GetSamplesPerSecond() == 42
	})
	if got := status.GetWorkers()[0]; got.GetWeightsVersion() != 3 || got.GetTokensPerSecond() != 1000 || got.GetActivity() != "samples 12 sequences" || !got.GetHealthy() {
		t.Errorf("worker %v", got)
	}
	if address := <-asked; address != status.GetWorkers()[0].GetAddress() {
		t.Errorf("asked %s", address)
	}
	got, err := w.generation.GetRun(t.Context(), &runv1.GetRunRequest{RunId: "test-run"})
	if err != nil || got.GetStatus().GetRun().GetRunId() != run || len(got.GetStatus().GetWorkers()) != 2 {
		t.Errorf("got %v, %v", got, err)
	}
}

// The view changes without pause: a watcher gets at most five messages a second, and a change of
// state at once.
func TestWatchIsRateLimited(t *testing.T) {
	t.Parallel()
	w, run := idle(t, plan(4, "sync", 0, false))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	changing := make(chan struct{})
	go func() {
		defer close(changing)
		often := time.NewTicker(2 * time.Millisecond)
		defer often.Stop()
		for n := 0; ctx.Err() == nil; n++ {
			w.mesh.do(func() {
				w.mesh.progress = proto.CloneOf(w.mesh.progress)
				w.mesh.progress.Waits = []*waitv1.Wait{{Owner: "learner-controller", Reason: "LEASING", Evidence: fmt.Sprint("change ", n)}}
			})
			<-often.C
		}
	}()
	times := &timer{ctx: ctx, cancel: cancel}
	begun := time.Now()
	if err := w.generation.WatchRun(&runv1.WatchRunRequest{RunId: run}, times); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	<-changing
	if most := int(time.Since(begun)/(200*time.Millisecond)) + 1; times.sent > most {
		t.Errorf("%d messages in %v", times.sent, time.Since(begun))
	}
}

type timer struct {
	grpc.ServerStream
	ctx    context.Context
	cancel context.CancelFunc
	sent   int
}

func (s *timer) Context() context.Context { return s.ctx }

func (s *timer) Send(*runv1.WatchRunResponse) error {
	if s.sent++; s.sent == 3 {
		s.cancel()
	}
	return nil
}

func TestNewRefusesMissingDependencies(t *testing.T) {
	t.Parallel()
	if _, err := scheduler.New(scheduler.Config{}, scheduler.Deps{}); err == nil {
		t.Fatal("a scheduler of nothing was made")
	}
	if _, err := scheduler.New(scheduler.Config{StateDir: "/state", Worker: scheduler.WorkerConfig{Command: []string{"w"}}}, scheduler.Deps{}); err == nil ||
		!strings.Contains(err.Error(), "no store") || !strings.Contains(err.Error(), "no bus") {
		t.Fatalf("got %v", err)
	}
}

func TestNewRefusesAStateWithRunsOfAnotherPlanFormat(t *testing.T) {
	t.Parallel()
	w := setup(t)
	old := storetest.Sample("run-00000000000000000000000001", "old", scheduler.Succeeded)
	old.Plan = &planv1.Plan{Format: 1}
	if _, err := w.store.Create(t.Context(), old, "", scheduler.Cursor{}); err != nil {
		t.Fatal(err)
	}
	_, err := scheduler.New(w.config, scheduler.Deps{
		Store: w.store, Planner: w.planner, Buffer: w.mesh.ledger, Controller: w.mesh.controller, Snapshots: w.snapshots,
		Sessions: w.erased.sessions(), EventLog: w.erased.log(),
		Bus: w.mesh.bus, Registry: w.registry, Launcher: w.launcher, Dial: w.dial, Events: w.events, Log: slog.New(slog.DiscardHandler),
	})
	if !errors.Is(err, scheduler.ErrStateFormat) || !strings.Contains(err.Error(), old.GetRunId()) || !strings.Contains(rpcerr.Fix(err), "delete these runs") {
		t.Errorf("got %v, fix %q", err, rpcerr.Fix(err))
	}
}
