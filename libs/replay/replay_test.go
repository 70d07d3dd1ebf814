package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/audit"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/files"
	"github.com/rollout-rl/rollout/libs/exit"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// table is evidence whose rows a test changes before they are added.
type table struct {
	*audit.Evidence
	Steps   []*bufferv1.StepRecord
	Groups  []*bufferv1.GroupRecord
	Samples []*bufferv1.SampleRecord
}

// add adds the rows, and deletes them at the end of the test.
func (e *table) add(t *testing.T) *audit.Evidence {
	t.Helper()
	all := *e.Evidence
	all.Rows = audit.NewRows(t.TempDir())
	t.Cleanup(func() { _ = all.Close() })
	if err := all.Add(&bufferv1.ExportLedgerResponse{Steps: e.Steps, Groups: e.Groups, Samples: e.Samples}); err != nil {
		t.Fatal(err)
	}
	return &all
}

// recorded is the evidence of two steps of one group of two samples. The second sample of the
// second step is an artifact.
func recorded() *table {
	e := &table{Evidence: &audit.Evidence{
		Run: &runv1.Run{RunId: "run-1", BaseDir: "/jobs", Plan: &planv1.Plan{Config: &configv1.RunConfig{Name: proto.String("sums")}}},
		Ledger: &bufferv1.LedgerRecord{
			Folder: "/segments/run-1", Config: &bufferv1.LedgerConfig{GroupsPerStep: 1, GroupSize: 2, Rows: 10},
		},
		Weights: []*bufferv1.WeightsRecord{{Version: 0, Digest: "w0"}, {Version: 1, Digest: "w1"}, {Version: 2, Digest: "w2"}},
		Snapshots: []*snapshotv1.Snapshot{
			{SnapshotId: "snap-2", Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Step: 2},
			{SnapshotId: "snap-1", Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Step: 1},
			{SnapshotId: "snap-other", Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_EPISODIC, Step: 1},
		},
	}}
	for step := uint64(1); step <= 2; step++ {
		index := step - 1
		e.Steps = append(e.Steps, &bufferv1.StepRecord{Step: step, BatchId: fmt.Sprint("b", step), WeightsDigest: fmt.Sprint("w", step), Chain: fmt.Sprint("c", step), Groups: 1, Samples: 2})
		e.Groups = append(e.Groups, &bufferv1.GroupRecord{
			Key: &bufferv1.GroupKey{Index: index}, Position: index, Step: step, State: bufferv1.GroupState_GROUP_STATE_CONSUMED,
		})
		for n := range uint32(2) {
			e.Samples = append(e.Samples, &bufferv1.SampleRecord{Segment: uint32(step), Ref: &bufferv1.SampleRef{
				Key: &trajectoryv1.TrajectoryKey{RunId: "run-1", Index: index, Sample: n}, Offset: uint64(n) * 50, Length: 50,
			}})
		}
	}
	last := e.Samples[3]
	last.Segment, last.Ref.PayloadRef, last.Ref.Offset = 0, "blake3-payload", 7
	return e
}

// kept writes artifacts and snapshots with a known content.
type kept struct{}

func (kept) Artifact(_ context.Context, content, path string) error {
	return os.WriteFile(path, []byte("content of "+content), 0o600)
}

func (kept) Snapshot(_ context.Context, s *snapshotv1.Snapshot, folder string) error {
	return errors.Join(os.MkdirAll(folder, 0o700), os.WriteFile(filepath.Join(folder, "id"), []byte(s.GetSnapshotId()), 0o600))
}

// job is a job whose worker keeps the spec, prints lines and exits with code.
func job(t *testing.T, e *table, lines string, code int) (j *Job, spec string) {
	t.Helper()
	dir := t.TempDir()
	worker, spec := filepath.Join(dir, "worker"), filepath.Join(dir, "kept.jsonl")
	script := fmt.Sprintf("#!/bin/sh\ncp \"$3\" %s\ncat <<'END'\n%s\nEND\necho its log >&2\nexit %d\n", spec, lines, code)
	if err := os.WriteFile(worker, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return &Job{Evidence: e.add(t), Files: kept{}, Worker: []string{worker}, Threads: 2, Scratch: t.TempDir(), Log: io.Discard}, spec
}

func line(step int, recorded, replayed string) string {
	return fmt.Sprintf(`{"step": %d, "recorded": %q, "replayed": %q, "samples": 2}`, step, recorded, replayed)
}

// records reads the lines of a spec.
func records(t *testing.T, path string) (out []map[string]any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var record map[string]any
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			t.Fatal(err)
		}
		out = append(out, record)
	}
	return out
}

// After the loss of steps 1 and 2 their batches were trained again, with other bits from version 1
// on. The steps after them were trained from those, so that a replay compares with those.
func TestTheNewestLineageIsReplayed(t *testing.T) {
	t.Parallel()
	e := recorded()
	e.Lineages = []*bufferv1.LineageRecord{{Lineage: 1, FirstVersion: 1, Step: 2}}
	e.Weights = append([]*bufferv1.WeightsRecord{{Version: 1, Lineage: 1, Digest: "v1"}, {Version: 2, Lineage: 1, Digest: "v2"}}, e.Weights...)
	j, spec := job(t, e, line(0, "w0", "w0")+"\n"+line(1, "v1", "v1")+"\n"+line(2, "v2", "v2"), 0)
	if err := j.Run(t.Context(), func(Step) {}); err != nil {
		t.Fatal(err)
	}
	for at, want := range []string{"w0", "v1", "v2"} {
		if got := records(t, spec)[at]["digest"]; got != want {
			t.Errorf("version %d: %v, want %s", at, got, want)
		}
	}
}

func TestTheWorkerGetsTheBatches(t *testing.T) {
	t.Parallel()
	j, spec := job(t, recorded(), "a library prints\n"+line(0, "w0", "w0")+"\n"+line(1, "w1", "w1")+"\n"+line(2, "w2", "w2"), 0)
	var log bytes.Buffer
	j.Log = &log
	var steps []Step
	if err := j.Run(t.Context(), func(s Step) { steps = append(steps, s) }); err != nil {
		t.Fatal(err)
	}
	if len(steps) != 3 || !steps[2].Same() || steps[2].Samples != 2 || log.String() != "its log\n" {
		t.Errorf("%+v, log %q", steps, log.String())
	}
	lines := records(t, spec)
	if len(lines) != 3 {
		t.Fatalf("%v", lines)
	}
	head := lines[0]
	if head["base_dir"] != "/jobs" || head["threads"] != 2.0 || head["state_directory"] != "" || head["step"] != 0.0 || head["digest"] != "w0" {
		t.Errorf("head %v", head)
	}
	batch := lines[2]["batch"].(map[string]any)
	samples := batch["samples"].([]any)
	first, second := samples[0].(map[string]any), samples[1].(map[string]any)
	if lines[2]["digest"] != "w2" || batch["batch_id"] != "b2" || first["segment"] != "/segments/run-1/000002.seg" {
		t.Errorf("%v", lines[2])
	}
	artifact := second["segment"].(string)
	if text, err := os.ReadFile(artifact); err != nil || string(text) != "content of blake3-payload" || second["length"] != fmt.Sprint(len(text)) || second["offset"] != nil {
		t.Errorf("%v: %v", err, second)
	}
}

// In an asynchronous run steps take groups in another order than that of positions.
func TestABatchHasTheGroupsOfItsStep(t *testing.T) {
	t.Parallel()
	e := recorded()
	e.Groups[0].Step, e.Groups[1].Step = 2, 1
	j, spec := job(t, e, line(2, "w2", "w2"), 0)
	if err := j.Run(t.Context(), func(Step) {}); err != nil {
		t.Fatal(err)
	}
	for step, want := range map[int]string{1: "1", 2: ""} {
		for _, s := range records(t, spec)[step]["batch"].(map[string]any)["samples"].([]any) {
			if index, _ := s.(map[string]any)["key"].(map[string]any)["index"].(string); index != want {
				t.Errorf("step %d has a sample of row %q, want %q", step, index, want)
			}
		}
	}
}

// The memory of the batches does not grow with their number: ten times as many need the same. This
// test does not run in parallel with others, because it measures the whole process.
func TestMemoryDoesNotGrowWithTheGroups(t *testing.T) {
	measure := func(steps uint64) uint64 {
		all := *recorded().Evidence
		all.Ledger.Config.Rows, all.Rows = 1<<20, audit.NewRows(t.TempDir())
		defer all.Close()
		const perStep = 100
		for step := uint64(1); step <= steps; step++ {
			m := &bufferv1.ExportLedgerResponse{Steps: []*bufferv1.StepRecord{{Step: step, Chain: "c", Groups: perStep, Samples: perStep}}}
			for p := (step - 1) * perStep; p < step*perStep; p++ {
				m.Groups = append(m.Groups, &bufferv1.GroupRecord{Key: &bufferv1.GroupKey{Index: p}, Position: p, Step: step, State: bufferv1.GroupState_GROUP_STATE_CONSUMED})
				m.Samples = append(m.Samples, &bufferv1.SampleRecord{Segment: 1, Ref: &bufferv1.SampleRef{Key: &trajectoryv1.TrajectoryKey{RunId: "run-1", Index: p}}})
			}
			if err := all.Add(m); err != nil {
				t.Fatal(err)
			}
		}
		ended := make(chan error)
		go func() {
			_, err := (&Job{Evidence: &all, Files: kept{}, Scratch: t.TempDir()}).spec(t.Context())
			ended <- err
		}()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
		for heaps := []uint64{}; ; {
			runtime.GC()
			metrics.Read(live)
			heaps = append(heaps, live[0].Value.Uint64())
			select {
			case err := <-ended:
				if err != nil {
					t.Fatal(err)
				}
				slices.Sort(heaps)
				return heaps[len(heaps)/2] // what is allocated while a collection marks counts too, so single values are too large
			case <-tick.C:
			}
		}
	}
	small, large := measure(2000), measure(4000) // the buffers of the sorters are full in both
	t.Logf("200,000 groups: %.1f MiB; 400,000 groups: %.1f MiB", float64(small)/(1<<20), float64(large)/(1<<20))
	if large > small+14<<20 { // 70 bytes a group, of which a row alone takes more
		t.Errorf("the replay of 200,000 groups had %d bytes of live heap, that of 400,000 groups %d", small, large)
	}
}

// Where samples are deleted the replay begins with the oldest snapshot that covers them.
func TestItBeginsWithTheSnapshotThatCoversDeletedSamples(t *testing.T) {
	t.Parallel()
	e := recorded()
	e.Samples[0].Trimmed = true
	j, spec := job(t, e, line(2, "w2", "w2"), 0)
	if err := j.Run(t.Context(), func(Step) {}); err != nil {
		t.Fatal(err)
	}
	lines := records(t, spec)
	state := lines[0]["state_directory"].(string)
	if text, err := os.ReadFile(filepath.Join(state, "id")); err != nil || string(text) != "snap-1" {
		t.Errorf("%v: %s", err, text)
	}
	if len(lines) != 2 || lines[0]["step"] != 1.0 || lines[0]["digest"] != "w1" {
		t.Errorf("%v", lines)
	}
	e.Groups[0].State = bufferv1.GroupState_GROUP_STATE_EXCLUDED // no step reads its samples
	e.Steps[0].Samples = 0
	j, spec = job(t, e, line(2, "w2", "w2"), 0)
	if err := j.Run(t.Context(), func(Step) {}); err != nil {
		t.Fatal(err)
	}
	if got := records(t, spec)[0]["state_directory"]; got != "" {
		t.Errorf("it begins with %v", got)
	}
}

func TestOtherWeightsEndTheReplay(t *testing.T) {
	t.Parallel()
	j, _ := job(t, recorded(), line(1, "w1", "other"), 65)
	var steps []Step
	if err := j.Run(t.Context(), func(s Step) { steps = append(steps, s) }); err != nil || len(steps) != 1 || steps[0].Same() {
		t.Errorf("%v %+v", err, steps)
	}
}

func TestTheThreadsAreThoseOfTheRun(t *testing.T) {
	t.Parallel()
	e := recorded()
	e.Run.Directory = t.TempDir()
	folder := filepath.Join(e.Run.GetDirectory(), "workers")
	if err := errors.Join(os.MkdirAll(folder, 0o700), os.WriteFile(filepath.Join(folder, "learner-0.json"), []byte(`{"threads": 5}`), 0o600)); err != nil {
		t.Fatal(err)
	}
	j, spec := job(t, e, line(1, "w1", "w1"), 0)
	j.Threads = -1
	if err := j.Run(t.Context(), func(Step) {}); err != nil {
		t.Fatal(err)
	}
	if got := records(t, spec)[0]["threads"]; got != 5.0 {
		t.Errorf("%v threads", got)
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()
	for text, c := range map[string]struct {
		change func(*table, *Job)
		code   int
	}{
		"has no committed step":                  {func(e *table, j *Job) { e.Ledger = nil }, exit.Data},
		"a ledger without a run":                 {func(e *table, j *Job) { e.Unscheduled = true }, exit.Data},
		"no snapshot of a later step exists":     {func(e *table, j *Job) { e.Samples[2].Trimmed, e.Snapshots = true, nil }, exit.Data},
		"sample 0 of group 0/0: checksum":        {func(e *table, j *Job) { e.Samples[0].Flaw = "checksum" }, exit.Data},
		"trained on 2 samples; the ledger has 1": {func(e *table, j *Job) { e.Samples = e.Samples[1:] }, exit.Data},
		"start the learner":                      {func(e *table, j *Job) { j.Worker = []string{"/nowhere/worker"} }, exit.NoInput},
		"could not train":                        {func(*table, *Job) {}, exit.Data},
		"number of threads of the run's":         {func(e *table, j *Job) { j.Threads = -1 }, exit.NoInput},
	} {
		e := recorded()
		j, _ := job(t, e, "", 1)
		c.change(e, j)
		j.Evidence = e.add(t)
		err := j.Run(t.Context(), func(Step) {})
		if found := exit.From(err); err == nil || !strings.Contains(err.Error(), text) || found.Code != c.code || found.Fix == "" && text != "has no committed step" {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestArtifactsAreWritten(t *testing.T) {
	t.Parallel()
	store, err := files.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	artifacts, folder := Artifacts{blob.NewCAS(store, store.Spool())}, filepath.Join(t.TempDir(), "state")
	content, err := artifacts.PutBytes(t.Context(), []byte("weights"))
	if err != nil {
		t.Fatal(err)
	}
	snapshot := &snapshotv1.Snapshot{SnapshotId: "snap-1", Files: []*snapshotv1.SnapshotFile{{Path: "weights/model", Digest: content}}}
	if err := artifacts.Snapshot(t.Context(), snapshot, folder); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(folder, "weights/model")); err != nil || string(text) != "weights" {
		t.Errorf("%v %s", err, text)
	}
	snapshot.Files[0].Path = "../model"
	if err := artifacts.Snapshot(t.Context(), snapshot, folder); err == nil || !strings.Contains(err.Error(), "a file outside of its folder: ../model") {
		t.Errorf("%v", err)
	}
	if err := artifacts.Artifact(t.Context(), "blake3-"+strings.Repeat("0", 64), filepath.Join(folder, "x")); err == nil {
		t.Error("a missing artifact was written")
	}
}

// chunks is a storage service whose artifacts are two chunks long.
type chunks struct {
	storagev1.ArtifactServiceClient
	failure error
}

func (c chunks) GetArtifact(context.Context, *storagev1.GetArtifactRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[storagev1.GetArtifactResponse], error) {
	return &chunkStream{left: []string{"first ", "second"}, failure: c.failure}, nil
}

type chunkStream struct {
	grpc.ServerStreamingClient[storagev1.GetArtifactResponse]
	left    []string
	failure error
}

func (s *chunkStream) Recv() (*storagev1.GetArtifactResponse, error) {
	if len(s.left) == 0 {
		if s.failure != nil {
			return nil, s.failure
		}
		return nil, io.EOF
	}
	chunk := s.left[0]
	s.left = s.left[1:]
	return &storagev1.GetArtifactResponse{Chunk: []byte(chunk)}, nil
}

// maker is a snapshot service that records the folder.
type maker struct {
	snapshotv1.SnapshotServiceClient
	asked *snapshotv1.MaterializeSnapshotRequest
}

func (m *maker) MaterializeSnapshot(_ context.Context, r *snapshotv1.MaterializeSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.MaterializeSnapshotResponse, error) {
	m.asked = r
	return &snapshotv1.MaterializeSnapshotResponse{}, nil
}

func TestServicesAreAsked(t *testing.T) {
	t.Parallel()
	path, snapshots := filepath.Join(t.TempDir(), "a/b"), &maker{}
	if err := (Services{Artifacts: chunks{}}).Artifact(t.Context(), "blake3-x", path); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "first second" {
		t.Errorf("%v %s", err, text)
	}
	broken := errors.New("the stream broke")
	if err := (Services{Artifacts: chunks{failure: broken}}).Artifact(t.Context(), "blake3-x", path); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	if err := (Services{Snapshots: snapshots}).Snapshot(t.Context(), &snapshotv1.Snapshot{SnapshotId: "snap-1"}, "/state"); err != nil ||
		snapshots.asked.GetSnapshotId() != "snap-1" || snapshots.asked.GetDirectory() != "/state" {
		t.Errorf("%v %v", err, snapshots.asked)
	}
}
