package audit

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/refusal"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

const (
	testRun  = "run-1"
	testRows = 4
	testSize = 2
)

func digestOf(version uint64) string { return fmt.Sprintf("blake3-%064x", version+1) }

// table is evidence whose rows a test changes before they are added.
type table struct {
	Evidence
	Steps   []*bufferv1.StepRecord
	Groups  []*bufferv1.GroupRecord
	Samples []*bufferv1.SampleRecord
}

// audit checks the evidence.
func (e *table) audit(t *testing.T) *Report {
	t.Helper()
	all := e.Evidence
	all.Rows = NewRows(t.TempDir())
	defer all.Close()
	if err := all.Add(&bufferv1.ExportLedgerResponse{Steps: e.Steps, Groups: e.Groups, Samples: e.Samples}); err != nil {
		t.Fatal(err)
	}
	r, err := Check(&all)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// batchID is the id of a batch of samples.
func batchID(samples []*bufferv1.SampleRecord) string {
	h := newBatchHash()
	for _, s := range samples {
		_, _ = h.Write(appendSample(nil, s))
	}
	return h.ID()
}

// sampleOf is the record of a sample that weights version sampled, two trained tokens long.
func sampleOf(position uint64, sample uint32, version uint64) *bufferv1.SampleRecord {
	key := &trajectoryv1.TrajectoryKey{RunId: testRun, Epoch: uint32(position / testRows), Index: position % testRows, Sample: sample}
	return &bufferv1.SampleRecord{
		Segment: 1, MinVersion: version, ReceiptVersion: version, Key: key, Trained: 2,
		Spans: []*trajectoryv1.VersionSpan{{End: 2, Version: version, Digest: digestOf(version)}},
		Ref: &bufferv1.SampleRef{
			Key: proto.CloneOf(key), Offset: 100*position + 10*uint64(sample), Length: 10, Crc32C: uint32(7*position) + sample,
			Outcome: trajectoryv1.Outcome_OUTCOME_COMPLETED, Reward: float64(sample),
		},
	}
}

func groupOf(position uint64, state bufferv1.GroupState, step uint64) *bufferv1.GroupRecord {
	return &bufferv1.GroupRecord{
		Key: &bufferv1.GroupKey{Epoch: uint32(position / testRows), Index: position % testRows}, Position: position, State: state, Step: step, Samples: testSize,
	}
}

// intact is the evidence of a run of 4 steps of one prompt after its second step: the third is
// leased, the fourth prompt is ready, and a snapshot was taken after the first step.
func intact() *table {
	e := &table{Evidence: Evidence{
		Run: &runv1.Run{
			RunId: testRun, Name: "sums", State: runv1.RunState_RUN_STATE_RUNNING, Step: 2, WeightsDigest: digestOf(2),
			Plan: &planv1.Plan{
				Config: &configv1.RunConfig{
					Deterministic: proto.Bool(true), Sampling: &configv1.SamplingConfig{GroupSize: proto.Uint32(testSize)},
					Train:     &configv1.TrainConfig{Steps: proto.Uint64(4), GroupsPerStep: proto.Uint32(1)},
					Staleness: &configv1.StalenessConfig{MaxSteps: proto.Uint32(1)},
				},
				Inputs: []*planv1.Input{{Role: planv1.InputRole_INPUT_ROLE_TRAIN_DATA, Rows: testRows}},
			},
		},
		Ledger: &bufferv1.LedgerRecord{
			Config: &bufferv1.LedgerConfig{
				GroupsPerStep: 1, GroupSize: testSize, Rows: testRows, Order: bufferv1.LeaseOrder_LEASE_ORDER_POSITION, Receipts: true, MaxStaleness: 1,
			},
			State: &bufferv1.LedgerState{Step: 2, Consumed: 2, Leased: 1, Ready: 1},
		},
		Segments: []*bufferv1.SegmentRecord{{Number: 1, Bytes: 500, FileBytes: 500}},
		Snapshots: []*snapshotv1.Snapshot{{
			SnapshotId: "snap-1", RunId: testRun, Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Step: 1, WeightsDigest: digestOf(1),
			Cursor: &runv1.Cursor{Position: 1}, Files: []*snapshotv1.SnapshotFile{{Path: "state.json", Digest: "blake3-state"}},
		}},
		CursorBefore: 4, CursorAfter: 4,
	}}
	states := []bufferv1.GroupState{consumed, consumed, leased, ready}
	for p, state := range states {
		position, step := uint64(p), uint64(p)+1
		if state == ready {
			step = 0
		}
		e.Groups = append(e.Groups, groupOf(position, state, step))
		for n := range uint32(testSize) {
			e.Samples = append(e.Samples, sampleOf(position, n, min(position, 2)))
		}
	}
	for version := range uint64(3) {
		e.Weights = append(e.Weights, &bufferv1.WeightsRecord{Version: version, Digest: digestOf(version)})
	}
	for step := uint64(1); step <= 3; step++ {
		s := &bufferv1.StepRecord{Step: step, Groups: 1, Samples: testSize, EndPosition: step, BatchId: batchID(e.Samples[testSize*(step-1) : testSize*step])}
		if step <= 2 {
			s.WeightsDigest = digestOf(step)
			s.Chain = chainLink(e.Ledger.GetChain(), s)
			e.Ledger.Chain = s.GetChain()
		}
		e.Steps = append(e.Steps, s)
	}
	return e
}

// dynamically changes an intact run to one with dynamic sampling, whose second prompt was excluded
// for equal rewards.
func dynamically(e *table) {
	c, s := e.Ledger.GetConfig(), e.Ledger.GetState()
	c.DrawBatches = 10
	s.Consumed, s.Excluded, s.Skipped = 2, 1, 1
	s.Ready, s.Leased = 1, 0
	e.Groups[1].State, e.Groups[1].Reason, e.Groups[1].Step = excluded, zeroAdvantage, 2
	e.Groups[2].State, e.Groups[2].Step = consumed, 2
	for n := range testSize {
		e.Samples[2+n].Ref.Reward = 1
		e.Samples[4+n] = sampleOf(2, uint32(n), 1)
	}
	second := e.Steps[1]
	second.Excluded, second.ZeroAdvantage, second.EndPosition, second.BatchId = 1, 1, 3, batchID(e.Samples[4:6])
	second.Chain = chainLink(e.Steps[0].GetChain(), second)
	e.Ledger.Chain = second.GetChain()
	e.Steps = e.Steps[:2]
	e.Run.Plan.Config.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dapo{Dapo: &configv1.DapoConfig{}}}
}

// undigested changes an intact run to one that does not promise bits and did not publish the
// weights of its second step.
func undigested(e *table) {
	e.Run.Plan.Config.Deterministic = proto.Bool(false)
	second := e.Steps[1]
	second.WeightsDigest = ""
	second.Chain = chainLink(e.Steps[0].GetChain(), second)
	e.Ledger.Chain = second.GetChain()
	e.Weights = slices.DeleteFunc(e.Weights, func(w *bufferv1.WeightsRecord) bool { return w.GetVersion() == 2 })
	for n := range testSize {
		e.Samples[4+n] = sampleOf(2, uint32(n), 1)
	}
}

// leftOut changes a run to one whose groups may have one sample less, and fails the first sample of
// a group.
func leftOut(e *table, group int) {
	e.Ledger.Config.MinGroupSize = testSize - 1
	s := e.Samples[testSize*group]
	s.Ref.Outcome, s.Ref.Reward, s.Trained, s.Spans = trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, 0, 0, nil
}

func TestAnIntactRunHasNoBreaks(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*table){
		"in progress": func(*table) {}, "dynamic": dynamically, "a step without a digest": undigested,
		"a sample left out":                  func(e *table) { leftOut(e, 0) },
		"a sample left out of equal rewards": func(e *table) { dynamically(e); leftOut(e, 1) },
		"without a ledger": func(e *table) {
			*e = table{Evidence: Evidence{Run: &runv1.Run{RunId: testRun, State: runv1.RunState_RUN_STATE_PENDING}}}
		},
		"stopped by a gate": func(e *table) {
			e.Run.State, e.Run.Reason, e.Run.Step = runv1.RunState_RUN_STATE_SUCCEEDED, refusal.StoppedByGate, 2
		},
		"a gate restored earlier weights": func(e *table) {
			head := e.Ledger.GetChain()
			lose(e)
			e.Run.Plan.Config.Deterministic = proto.Bool(true)
			e.Run.Plan.Config.Gates = map[string]*configv1.GateConfig{"worse": {Action: proto.String("restore_best")}}
			e.Weights[3].Digest, e.Run.WeightsDigest = e.Weights[1].GetDigest(), e.Weights[1].GetDigest()
			e.Ledger.Chain = retrainedLink(head, e.Weights[3])
		},
		"without the scheduler": func(e *table) {
			e.Run, e.Unscheduled, e.Snapshots, e.CursorBefore, e.CursorAfter = &runv1.Run{RunId: testRun}, true, nil, 0, 0
		},
	} {
		e := intact()
		change(e)
		if r := e.audit(t); !r.Whole || len(r.Breaks) > 0 || (len(r.Skipped) > 0) != e.Unscheduled {
			t.Errorf("%s: %+v, skipped %v", name, r.Breaks, r.Skipped)
		}
	}
}

func TestTheReportCounts(t *testing.T) {
	t.Parallel()
	r := intact().audit(t)
	if r.RunID != testRun || r.Name != "sums" || r.State != "RUNNING" || r.Steps != 2 || r.Digest != digestOf(2) {
		t.Errorf("%+v", r)
	}
	if want := (Samples{Trained: 4, Verified: 4, Tokens: 8, Receipts: 4}); r.Samples != want {
		t.Errorf("samples %+v, want %+v", r.Samples, want)
	}
	if want := []Epoch{{Consumed: 2, InFlight: 2}}; !slices.Equal(r.Epochs, want) {
		t.Errorf("epochs %+v, want %+v", r.Epochs, want)
	}
	if want := (Segments{Whole: 1, Bytes: 500}); r.Segments != want {
		t.Errorf("segments %+v, want %+v", r.Segments, want)
	}
	e := intact()
	dynamically(e)
	if r := e.audit(t); r.Excluded[zeroAdvantage] != 1 || r.Samples.Trained != 4 {
		t.Errorf("with dynamic sampling: %+v", r)
	}
	e = intact()
	leftOut(e, 0)
	if want := (Samples{Trained: 3, Verified: 3, Tokens: 6, Receipts: 3}); e.audit(t).Samples != want {
		t.Errorf("with a sample left out: %+v, want %+v", e.audit(t).Samples, want)
	}
}

// breaks has a change for each kind of break.
var breaks = map[string]func(*table){
	"BATCH_CHANGED":            func(e *table) { e.Samples[0].Ref.Crc32C++ },
	"CHAIN_BROKEN":             func(e *table) { e.Steps[0].Chain = digestOf(9) },
	"CONSUMED_BY_NO_STEP":      func(e *table) { e.Steps[1].WeightsDigest, e.Steps[1].Chain = "", "" },
	"CURSOR_BEHIND":            func(e *table) { e.CursorAfter = 3 },
	"CURSOR_BEYOND":            func(e *table) { e.CursorBefore = 5 },
	"DISSOLVED_WITHOUT_REASON": func(e *table) { e.Groups[3].State = dissolved },
	"EXCLUDED_UNEQUAL":         func(e *table) { dynamically(e); e.Samples[2].Ref.Reward = 0.5 },
	"EXCLUDED_WITHOUT_REASON":  func(e *table) { e.Groups[3].State = excluded },
	"GROUP_MISPLACED":          func(e *table) { e.Groups[3].Key.Index = 1 },
	"GROUP_MISSING":            func(e *table) { e.Groups = slices.Delete(e.Groups, 1, 2) },
	"GROUP_STATE_UNKNOWN":      func(e *table) { e.Groups[3].State = 99 },
	"GROUP_TWICE":              func(e *table) { e.Groups = append(e.Groups, e.Groups[1]) },
	"LINEAGE_BROKEN":           func(e *table) { lose(e); e.Lineages[0].FirstVersion = 1 },
	"LINEAGE_FORBIDDEN":        func(e *table) { lose(e); e.Run.Plan.Config.Deterministic = proto.Bool(true) },
	"LINEAGE_GAP":              func(e *table) { e.Ledger.State.Lineage = 1 },
	"LEASED_BY_NO_STEP":        func(e *table) { e.Steps = e.Steps[:2] },
	"LEDGER_CONFIG":            func(e *table) { e.Ledger.Config.GroupSize = 3 },
	"LEDGER_COUNTS":            func(e *table) { e.Ledger.State.Consumed = 3 },
	"LEDGER_HEAD":              func(e *table) { e.Ledger.State.Step = 1 },
	"LEDGER_MISSING":           func(e *table) { e.Ledger = nil },
	"NOT_CONSUMED":             func(e *table) { e.Groups[0].State, e.Groups[0].Step = ready, 0 },
	"PAYLOAD_DAMAGED":          func(e *table) { e.Samples[0].Flaw = "another checksum" },
	"PAYLOAD_DROPPED_EARLY":    func(e *table) { e.Samples[0].Trimmed = true },
	"PAYLOAD_FOREIGN":          func(e *table) { e.Samples[0].Key.Sample = 1 },
	"PAYLOAD_SHARED":           func(e *table) { e.Samples[1].Ref.Offset = e.Samples[0].GetRef().GetOffset() },
	"RECEIPT_FROM_LATER":       func(e *table) { e.Samples[0].ReceiptVersion = 1 },
	"RECEIPT_MISMATCH":         func(e *table) { e.Samples[0].Spans[0].Digest = digestOf(9) },
	"RECEIPT_UNKNOWN":          func(e *table) { e.Samples[0].ReceiptVersion = 77 },
	"RECEIPT_UNSETTLED":        func(e *table) { e.Samples[0].ReceiptDigest = digestOf(0) },
	"RUN_AHEAD":                func(e *table) { e.Run.Step = 3 },
	"RUN_DIGEST":               func(e *table) { e.Run.State, e.Run.WeightsDigest = runv1.RunState_RUN_STATE_SUCCEEDED, digestOf(9) },
	"RUN_INCOMPLETE":           func(e *table) { e.Run.State = runv1.RunState_RUN_STATE_SUCCEEDED },
	"SAMPLES_LEFT":             func(e *table) { e.Groups[3].State, e.Groups[3].Reason = excluded, "ATTEMPTS_EXHAUSTED" },
	"SAMPLES_MISSING":          func(e *table) { e.Samples = e.Samples[1:] },
	"SAMPLE_COUNT":             func(e *table) { e.Groups[0].Samples = 9 },
	"SAMPLE_FOREIGN":           func(e *table) { e.Samples[0].Ref.Key.Attempt = 1 },
	"SAMPLE_WITHOUT_GROUP":     func(e *table) { e.Groups = e.Groups[:3] },
	"SEGMENT_DAMAGED":          func(e *table) { e.Segments[0].Flaw = "another checksum" },
	"SEGMENT_MISSING":          func(e *table) { e.Segments[0].Missing = true },
	"SEGMENT_SHORT":            func(e *table) { e.Segments[0].FileBytes = 499 },
	"SNAPSHOT_AHEAD":           func(e *table) { e.Snapshots[0].Step = 3 },
	"SNAPSHOT_CORRUPT":         func(e *table) { e.Corrupt = []string{"blake3-state"} },
	"SNAPSHOT_CURSOR":          func(e *table) { e.Snapshots[0].Cursor.Position = 2 },
	"SNAPSHOT_DIGEST":          func(e *table) { e.Snapshots[0].WeightsDigest = digestOf(9) },
	"SNAPSHOT_MISSING":         func(e *table) { e.Missing = []string{"blake3-state"} },
	"SPANS_BROKEN":             func(e *table) { e.Samples[0].Spans[0].Start = 1 },
	"SPAN_FOREIGN":             func(e *table) { e.Samples[0].Spans[0].Version = 1 },
	"STALE":                    func(e *table) { e.Ledger.Config.MaxStaleness, e.Samples[2].MinVersion = 0, 0 },
	"STEP_COUNTS":              func(e *table) { e.Steps[0].Groups = 2 },
	"STEP_GAP":                 func(e *table) { e.Steps = e.Steps[1:] },
	"STEP_SAMPLES":             func(e *table) { e.Steps[0].Samples = 3 },
	"STEP_TWICE":               func(e *table) { e.Steps = append(e.Steps, e.Steps[0]) },
	"STEP_WINDOW":              func(e *table) { dynamically(e); e.Steps[1].EndPosition = 4 },
	"UNTRAINABLE":              func(e *table) { e.Samples[0].Ref.Outcome = trajectoryv1.Outcome_OUTCOME_ABORTED },
	"WEIGHTS_FILE_CHANGED": func(e *table) {
		e.Published = []PublishedFile{{Version: 2, Path: "weights/v000002/config.json", Flaw: "it has another digest"}}
	},
	"WEIGHTS_FILE_MISSING": func(e *table) {
		e.Published = []PublishedFile{{Version: 2, Path: "weights/v000002/config.json", Flaw: "it does not exist", Missing: true}}
	},
	"WEIGHTS_MISSING": func(e *table) { e.Weights = e.Weights[1:] },
	"WEIGHTS_SWAPPED": func(e *table) { e.Weights[1].Digest = digestOf(9) },
	"WRONG_STEP":      func(e *table) { e.Groups[0].Step = 2 },
}

// lose changes an intact run to one whose weights version 2 was lost and retrained with other bits.
func lose(e *table) {
	e.Run.Plan.Config.Deterministic = proto.Bool(false)
	e.Run.WeightsDigest = digestOf(12)
	e.Lineages = []*bufferv1.LineageRecord{{Lineage: 1, FirstVersion: 2, Step: 2, OldLineage: bufferv1.OldLineage_OLD_LINEAGE_KEEP}}
	e.Weights = append(e.Weights, &bufferv1.WeightsRecord{Version: 2, Digest: digestOf(12), Lineage: 1, RetrainedAt: 2})
	e.Ledger.State.Lineage = 1
	e.Ledger.Chain = retrainedLink(e.Ledger.GetChain(), e.Weights[3])
}

// A run whose weights were lost is whole: the leased batch has samples of the lost weights, and
// further ones have samples of the retrained weights.
func TestALineageIsWhole(t *testing.T) {
	t.Parallel()
	e := intact()
	lose(e)
	e.Samples[7].Spans[0].Digest = digestOf(12)
	r := e.audit(t)
	if !r.Whole || r.Digest != digestOf(12) {
		t.Fatalf("%s %+v", r.Digest, r.Breaks)
	}
	if want := []Lineage{{Lineage: 1, First: 2, Step: 2, OldLineage: "keep"}}; !slices.Equal(r.Lineages, want) {
		t.Errorf("lineages %+v", r.Lineages)
	}
	e.Weights[3].Digest, e.Samples[7].Spans[0].Digest = digestOf(13), digestOf(13)
	if r := e.audit(t); r.Whole || r.Breaks[0].Kind != "LEDGER_HEAD" {
		t.Errorf("changed retrained weights: %+v", r.Breaks)
	}
}

func TestEachBreakIsReported(t *testing.T) {
	t.Parallel()
	for kind, change := range breaks {
		e := intact()
		change(e)
		r := e.audit(t)
		var reported []string
		for _, b := range r.Breaks {
			reported = append(reported, b.Kind+" "+b.Message)
			if b.Run != testRun || b.Message == "" {
				t.Errorf("%s: incomplete %+v", kind, b)
			}
		}
		if r.Whole || !slices.ContainsFunc(r.Breaks, func(b Break) bool { return b.Kind == kind }) {
			t.Errorf("%s is missing in\n%s", kind, strings.Join(reported, "\n"))
		}
	}
}

// A group with fewer usable samples than the ledger demands should have been dissolved.
func TestAFailedSampleOfATooSmallGroupIsABreak(t *testing.T) {
	t.Parallel()
	for _, least := range []uint32{0, testSize} {
		e := intact()
		leftOut(e, 0)
		e.Ledger.Config.MinGroupSize = least
		if r := e.audit(t); len(r.Breaks) != 1 || r.Breaks[0].Kind != "UNTRAINABLE" {
			t.Errorf("minimum %d: %+v", least, r.Breaks)
		}
	}
}

// A new kind of break needs a case in breaks.
func TestEachKindHasACase(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`"([A-Z]+(?:_[A-Z]+)*)", "`).FindAllStringSubmatch(string(text), -1) {
			if breaks[m[1]] == nil {
				t.Errorf("%s: no case breaks a run with %s", file, m[1])
			}
		}
	}
}

// Without the scheduler's run the checks of ledger and payloads still find what is damaged.
func TestALedgerWithoutARunIsChecked(t *testing.T) {
	t.Parallel()
	needRun := []string{
		"CURSOR_BEHIND", "CURSOR_BEYOND", "LEDGER_MISSING", "RUN_AHEAD", "RUN_DIGEST", "RUN_INCOMPLETE", "SNAPSHOT_AHEAD", "SNAPSHOT_CORRUPT",
		"SNAPSHOT_CURSOR", "SNAPSHOT_DIGEST", "SNAPSHOT_MISSING", "LEDGER_CONFIG", "LINEAGE_FORBIDDEN", "GROUP_MISSING", "WEIGHTS_FILE_CHANGED", "WEIGHTS_FILE_MISSING",
	}
	for kind, change := range breaks {
		if slices.Contains(needRun, kind) {
			continue
		}
		e := intact()
		change(e)
		e.Run, e.Unscheduled, e.Snapshots = &runv1.Run{RunId: testRun}, true, nil
		if r := e.audit(t); !slices.ContainsFunc(r.Breaks, func(b Break) bool { return b.Kind == kind }) {
			t.Errorf("%s is not reported: %+v", kind, r.Breaks)
		}
	}
}
