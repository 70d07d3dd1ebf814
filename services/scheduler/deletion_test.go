package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/storetest"
)

// erased records what the services were asked to delete, and fails calls.
type erased struct {
	mu   sync.Mutex
	all  []string
	keep []string
	fail string // service whose calls fail
	asks func() // what the gateway asks the scheduler before it lists its waits
}

func (e *erased) add(service, run string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.fail == service {
		return status.Error(codes.Unavailable, service+" is away")
	}
	e.all = append(e.all, service+" "+run)
	return nil
}

func (e *erased) set(fail string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fail = fail
}

func (e *erased) list() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.all)
}

func (e *erased) sessions() scheduler.Sessions { return erasedSessions{e} }
func (e *erased) log() scheduler.Log           { return erasedLog{e} }

type (
	erasedSessions struct{ *erased }
	erasedLog      struct{ *erased }
)

func (e erasedSessions) ListWaits(ctx context.Context, _ *gatewayv1.ListWaitsRequest, _ ...grpc.CallOption) (*gatewayv1.ListWaitsResponse, error) {
	if e.asks != nil {
		answered := make(chan struct{})
		go func() { defer close(answered); e.asks() }()
		select {
		case <-answered:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	return &gatewayv1.ListWaitsResponse{Waits: []*waitv1.Wait{{Owner: "agents", Reason: "NO_AGENT", Evidence: "no agent has asked for prompts"}}}, nil
}

func (e erasedSessions) DeleteRun(_ context.Context, in *gatewayv1.DeleteRunRequest, _ ...grpc.CallOption) (*gatewayv1.DeleteRunResponse, error) {
	return &gatewayv1.DeleteRunResponse{}, e.add("sessions", in.GetRunId())
}

func (e erasedLog) DeleteRun(_ context.Context, in *storagev1.DeleteRunRequest, _ ...grpc.CallOption) (*storagev1.DeleteRunResponse, error) {
	return &storagev1.DeleteRunResponse{}, e.add("events", in.GetRunId())
}

func (l *ledger) DeleteRun(_ context.Context, in *bufferv1.DeleteRunRequest, _ ...grpc.CallOption) (*bufferv1.DeleteRunResponse, error) {
	return &bufferv1.DeleteRunResponse{}, l.m.erased.add("ledger", in.GetRunId())
}

func (c *controller) DeleteRun(_ context.Context, in *learnerv1.DeleteRunRequest, _ ...grpc.CallOption) (*learnerv1.DeleteRunResponse, error) {
	return &learnerv1.DeleteRunResponse{}, c.m.erased.add("drive", in.GetRunId())
}

func (s *snapshots) UnpinSnapshot(_ context.Context, in *snapshotv1.UnpinSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.UnpinSnapshotResponse, error) {
	return &snapshotv1.UnpinSnapshotResponse{}, s.erased.add("unpin", in.GetSnapshotId())
}

func (s *snapshots) DeleteSnapshot(_ context.Context, in *snapshotv1.DeleteSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.DeleteSnapshotResponse, error) {
	return &snapshotv1.DeleteSnapshotResponse{}, s.erased.add("snapshot", in.GetSnapshotId())
}

func (s *snapshots) DeleteRun(_ context.Context, in *snapshotv1.DeleteRunRequest, _ ...grpc.CallOption) (*snapshotv1.DeleteRunResponse, error) {
	err := s.erased.add("snapshots", in.GetRunId())
	s.erased.mu.Lock()
	defer s.erased.mu.Unlock()
	s.erased.keep = in.GetKeep()
	return &snapshotv1.DeleteRunResponse{Kept: in.GetKeep()}, err
}

func (w *world) remove(run string) error {
	_, err := w.generation.DeleteRun(w.t.Context(), &runv1.DeleteRunRequest{RunId: run})
	return err
}

func (w *world) add(run *scheduler.Run) {
	w.t.Helper()
	if _, err := w.store.Create(w.t.Context(), run, "", scheduler.Cursor{}); err != nil {
		w.t.Fatal(err)
	}
}

const (
	first  = "run-01jz0000000000000000000001"
	second = "run-01jz0000000000000000000002"
	third  = "run-01jz0000000000000000000003"
	fourth = "run-01jz0000000000000000000004"
	origin = "snap-01jz0000000000000000000009"
)

func TestDeleteLeavesNothing(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	run := w.create(plan(2, "sync", 0, false)).GetRunId()
	w.waitState(run, scheduler.Succeeded)
	folder := filepath.Join(w.dir, "runs", run)
	if _, err := os.Stat(folder); err != nil {
		t.Fatal(err)
	}
	dry, err := w.generation.DeleteRun(t.Context(), &runv1.DeleteRunRequest{RunId: run, DryRun: true})
	if err != nil || dry.GetRun().GetState() != scheduler.Succeeded || len(w.erased.list()) > 0 {
		t.Fatalf("dry run: %v, %v, deleted %v", dry, err, w.erased.list())
	}
	if err := w.remove(run); err != nil {
		t.Fatal(err)
	}
	want := []string{"drive " + run, "ledger " + run, "sessions " + run, "snapshots " + run, "events " + run}
	if got := w.erased.list(); !slices.Equal(got, want) {
		t.Errorf("deleted %v, want %v", got, want)
	}
	if _, err := os.Stat(folder); !os.IsNotExist(err) {
		t.Errorf("the folder of the run: %v", err)
	}
	if _, err := w.store.Get(t.Context(), run); !errors.Is(err, scheduler.ErrNotFound) {
		t.Errorf("the record: %v", err)
	}
	if w.mesh.streams != "deleted" {
		t.Errorf("the streams are %s", w.mesh.streams)
	}
	if err := w.remove(run); rpcerr.Reason(err) != "RUN_NOT_FOUND" {
		t.Errorf("the second deletion: %v", err)
	}
}

func TestActiveRunIsNotDeleted(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	run := w.create(plan(1000, "sync", 0, false)).GetRunId()
	w.waitState(run, scheduler.Running)
	err := w.remove(run)
	if rpcerr.Reason(err) != "RUN_ACTIVE" || !strings.Contains(rpcerr.Fix(err), "rollout runs cancel "+run) {
		t.Errorf("%v, fix %q", err, rpcerr.Fix(err))
	}
	if got := w.erased.list(); len(got) > 0 {
		t.Errorf("deleted %v", got)
	}
}

// A deletion that was interrupted at any service is finished by the next scheduler.
func TestDeletionContinuesAfterARestart(t *testing.T) {
	t.Parallel()
	for _, service := range []string{"drive", "ledger", "sessions", "snapshots", "events"} {
		t.Run(service, func(t *testing.T) {
			t.Parallel()
			w := setup(t)
			w.start()
			w.add(storetest.Sample(first, "ended", scheduler.Failed))
			w.erased.set(service)
			if err := w.remove(first); rpcerr.Code(err) != codes.Unavailable {
				t.Fatalf("got %v", err)
			}
			run, err := w.store.Get(t.Context(), first)
			if err != nil || run.GetState() != scheduler.Deleting {
				t.Fatalf("the record is %v, %v", run.GetState(), err)
			}
			if _, err := w.generation.ResumeRun(t.Context(), &runv1.ResumeRunRequest{RunId: first}); rpcerr.Reason(err) != "RUN_NOT_RESUMABLE" {
				t.Errorf("it is resumed: %v", err)
			}
			w.kill()
			w.erased.set("")
			w.start()
			for _, err := w.store.Get(t.Context(), first); !errors.Is(err, scheduler.ErrNotFound); _, err = w.store.Get(t.Context(), first) {
				if t.Context().Err() != nil {
					t.Fatal(err)
				}
			}
			if got := w.erased.list(); !slices.Contains(got, "events "+first) {
				t.Errorf("deleted %v", got)
			}
		})
	}
}

// What other runs started from stays until they are deleted too.
func TestDeletionKeepsWhatOtherRunsNeed(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.snapshots.snap = &snapshotv1.Snapshot{SnapshotId: origin, RunId: first, Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE}
	w.start()
	w.add(storetest.Sample(first, "a", scheduler.Succeeded))
	for _, id := range []string{second, third} {
		fork := storetest.Sample(id, "b", scheduler.Succeeded)
		fork.FromSnapshot = origin
		w.add(fork)
	}
	dry, err := w.generation.DeleteRun(t.Context(), &runv1.DeleteRunRequest{RunId: first, DryRun: true})
	if err != nil || !slices.Equal(dry.GetKeptSnapshots(), []string{origin}) {
		t.Errorf("dry run: %v, %v", dry, err)
	}
	for _, step := range []struct {
		run  string
		keep []string
		gone bool
	}{{first, []string{origin}, false}, {second, []string{origin}, false}, {third, nil, true}} {
		if err := w.remove(step.run); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(w.erased.keep, step.keep) {
			t.Errorf("deleting %s keeps %v, want %v", step.run, w.erased.keep, step.keep)
		}
		if gone := slices.Contains(w.erased.list(), "snapshot "+origin); gone != step.gone {
			t.Errorf("after the deletion of %s the snapshot is deleted: %t", step.run, gone)
		}
	}
}

// A snapshot whose run exists is only unpinned when the run that started from it is deleted.
func TestDeletionUnpinsTheOrigin(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.snapshots.snap = &snapshotv1.Snapshot{SnapshotId: origin, RunId: first}
	w.start()
	w.add(storetest.Sample(first, "a", scheduler.Succeeded))
	fork := storetest.Sample(second, "b", scheduler.Succeeded)
	fork.FromSnapshot = origin
	w.add(fork)
	if err := w.remove(second); err != nil {
		t.Fatal(err)
	}
	if got := w.erased.list(); !slices.Contains(got, "unpin "+origin) || slices.Contains(got, "snapshot "+origin) {
		t.Errorf("deleted %v", got)
	}
}

// An imported snapshot has no run here. It is not deleted with a run that started from it; that of
// a run which was deleted here is.
func TestDeletionKeepsAnImportedSnapshot(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		of   *snapshotv1.Origin
		gone bool
	}{
		"imported":      {&snapshotv1.Origin{BaseDir: "/data"}, false},
		"of a deleted":  {&snapshotv1.Origin{BaseDir: "/data", Deleted: true}, true},
		"of an unknown": {nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := setup(t)
			w.snapshots.snap = &snapshotv1.Snapshot{SnapshotId: origin, RunId: first, Origin: c.of}
			w.start()
			fork := storetest.Sample(second, "b", scheduler.Succeeded)
			fork.FromSnapshot = origin
			w.add(fork)
			if err := w.remove(second); err != nil {
				t.Fatal(err)
			}
			if got := w.erased.list(); !slices.Contains(got, "unpin "+origin) || slices.Contains(got, "snapshot "+origin) != c.gone {
				t.Errorf("deleted %v", got)
			}
		})
	}
}

func TestRunWhoseFilesAreReadIsNotDeleted(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	w.add(storetest.Sample(first, "a", scheduler.Succeeded))
	reader := storetest.Sample(second, "b", scheduler.Succeeded)
	weights := filepath.Join(w.dir, "runs", first, "weights", "v000002", "model.safetensors")
	reader.Plan.Inputs = []*planv1.Input{{Path: weights}}
	w.add(reader)
	err := w.remove(first)
	if rpcerr.Reason(err) != "RUN_IN_USE" || !strings.Contains(err.Error(), weights) || !strings.Contains(rpcerr.Fix(err), second) {
		t.Errorf("%v, fix %q", err, rpcerr.Fix(err))
	}
	if err := errors.Join(w.remove(second), w.remove(first)); err != nil {
		t.Error(err)
	}
}

func TestNoRunStartsFromADeletedSnapshot(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.snapshots.snap = &snapshotv1.Snapshot{SnapshotId: origin, RunId: first, Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Step: 1}
	w.add(storetest.Sample(first, "a", scheduler.Deleting))
	w.erased.set("ledger")
	w.start()
	w.planner.set(plan(5, "sync", 0, false))
	_, err := w.generation.CreateRun(t.Context(), &runv1.CreateRunRequest{Lock: []byte("lock"), BaseDir: w.dir, FromSnapshot: origin})
	if rpcerr.Reason(err) != "SNAPSHOT_NOT_RESTORABLE" || len(w.snapshots.pinned) > 0 {
		t.Errorf("%v, pinned %v", err, w.snapshots.pinned)
	}
}

// A scheduler that died after it pinned a snapshot, and before it recorded the run that was to
// start from it, leaves a pin. The next one releases it, and no other pin: neither of a snapshot
// that another run started from, nor of one that a controller may have pinned.
func TestAPinWithoutARunIsReleased(t *testing.T) {
	t.Parallel()
	const needed = "snap-01jz0000000000000000000008"
	w := setup(t)
	collapsed, paused := storetest.Sample(third, "c", scheduler.Failed), storetest.Sample(fourth, "d", scheduler.Interrupted)
	collapsed.Reason = refusal.EntropyCollapse
	w.add(collapsed)
	w.add(paused)
	w.snapshots.held = []*snapshotv1.Snapshot{
		{SnapshotId: needed, RunId: first}, {SnapshotId: "snap-healthy", RunId: third}, {SnapshotId: "snap-paused", RunId: fourth},
		{SnapshotId: origin, RunId: first},
	}
	fork := storetest.Sample(second, "b", scheduler.Succeeded)
	fork.FromSnapshot = needed
	w.add(storetest.Sample(first, "a", scheduler.Succeeded))
	w.add(fork)
	w.start()
	for got := w.erased.list(); !slices.Equal(got, []string{"unpin " + origin}); got = w.erased.list() {
		if t.Context().Err() != nil || len(got) > 0 {
			t.Fatalf("released %v", got)
		}
		<-time.After(time.Millisecond)
	}
}

// Runs that ended too long ago are deleted when the scheduler starts, and each hour.
func TestRetention(t *testing.T) {
	t.Parallel()
	w := setup(t)
	now := time.Now()
	w.config.Retention = map[scheduler.State]time.Duration{scheduler.Failed: 48 * time.Hour}
	for id, run := range map[string]struct {
		state scheduler.State
		days  int
	}{first: {scheduler.Failed, 3}, second: {scheduler.Failed, 1}, third: {scheduler.Succeeded, 3}} {
		sample := storetest.Sample(id, "x", run.state)
		sample.EndTime = timestamppb.New(now.AddDate(0, 0, -run.days))
		w.add(sample)
	}
	w.start()
	for _, err := w.store.Get(t.Context(), first); !errors.Is(err, scheduler.ErrNotFound); _, err = w.store.Get(t.Context(), first) {
		if t.Context().Err() != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []string{second, third} {
		if _, err := w.store.Get(t.Context(), id); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	for _, what := range w.erased.list() {
		if !strings.HasSuffix(what, first) {
			t.Errorf("deleted %s", what)
		}
	}
}

// Of the runs that have ended only the newest stay. One that was interrupted is not deleted and
// does not count.
func TestRetentionByNumber(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.config.KeepRuns = 2
	id := func(n int) string { return fmt.Sprintf("run-01jz000000000000000000000%d", n) }
	for n, state := range []scheduler.State{scheduler.Succeeded, scheduler.Interrupted, scheduler.Failed, scheduler.Interrupted, scheduler.Cancelled, scheduler.Succeeded} {
		w.add(storetest.Sample(id(n), "x", state))
	}
	w.start()
	for n := range 6 {
		gone := n == 0 || n == 2
		for _, err := w.store.Get(t.Context(), id(n)); gone != errors.Is(err, scheduler.ErrNotFound); _, err = w.store.Get(t.Context(), id(n)) {
			if t.Context().Err() != nil || !gone {
				t.Fatalf("%s: %v", id(n), err)
			}
		}
	}
}
