// Package audit verifies a run from the rows of its ledger: each prompt of each epoch was consumed
// once or excluded for a reason; steps, batches and weights form one chain; every trained token was
// sampled by recorded weights; and the files of payloads, snapshots, and published weights are
// unchanged.
//
// Check is a pure function of the rows (Evidence). Gather reads them from running services.
//
// Digests are computed from their specification in docs/wire.md, not with the code of the buffer,
// so that a mistake there can't hide itself.
package audit

import (
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Evidence holds all rows of a run.
type Evidence struct {
	Run *runv1.Run
	// Unscheduled: the scheduler has no such run, because another program opened the ledger and sent
	// the samples. Run has an id only.
	Unscheduled bool
	Ledger      *bufferv1.LedgerRecord // nil if the run has no ledger
	Segments    []*bufferv1.SegmentRecord
	Weights     []*bufferv1.WeightsRecord
	Lineages    []*bufferv1.LineageRecord
	Steps       []*bufferv1.StepRecord
	Groups      []*bufferv1.GroupRecord
	Samples     []*bufferv1.SampleRecord
	Snapshots   []*snapshotv1.Snapshot
	Missing     []string // content ids of snapshot files that do not exist
	Corrupt     []string // content ids of snapshot files with other content
	Files       Files    // snapshot files that were read
	Published   []PublishedFile
	// The position of the scheduler's cursor before and after the ledger was read: the cursor of an
	// active run advances in between.
	CursorBefore, CursorAfter uint64
}

// Report is the result of an audit.
type Report struct {
	RunID    string         `json:"run_id"`
	Name     string         `json:"name"`
	State    string         `json:"state"`
	Whole    bool           `json:"whole"` // no breaks were found
	Steps    uint64         `json:"steps"` // committed by this run
	Chain    string         `json:"chain"`
	Digest   string         `json:"weights_digest"` // of the last step, in its newest lineage
	Lineages []Lineage      `json:"lineages"`       // without the first one
	Epochs   []Epoch        `json:"epochs"`
	Excluded map[string]int `json:"excluded"` // groups by reason
	Samples  Samples        `json:"samples"`
	Segments Segments       `json:"segments"`
	Files    Files          `json:"snapshot_files"`
	// Published counts the files of the weights in the run's folder.
	Published Files            `json:"weights_files"`
	Counts    map[string]int64 `json:"counts"`  // of the ledger: dropped duplicates, refused and failed samples
	Skipped   []Skipped        `json:"skipped"` // checks that do not apply
	Breaks    []Break          `json:"breaks"`
}

// Skipped is a check that does not apply, and why.
type Skipped struct {
	Check  string `json:"check"`
	Reason string `json:"reason"`
}

// Lineage is a lineage of the weights: what was retrained with other bits after a loss, and the
// versions since.
type Lineage struct {
	Lineage    uint32 `json:"lineage"`
	First      uint64 `json:"first_version"`
	Step       uint64 `json:"step"`        // last committed step when it began
	OldLineage string `json:"old_lineage"` // what became of samples of the lost weights
}

// Epoch counts the prompts of one pass over the dataset.
type Epoch struct {
	Epoch     uint64 `json:"epoch"`
	Consumed  uint64 `json:"consumed"`
	Excluded  uint64 `json:"excluded"`
	InFlight  uint64 `json:"in_flight"`   // issued, neither consumed nor excluded
	NotIssued uint64 `json:"not_reached"` // not issued
}

// Samples counts trained samples.
type Samples struct {
	Trained  uint64 `json:"trained"`
	Verified uint64 `json:"payloads_verified"` // read, and compared with ledger and weights
	Covered  uint64 `json:"payloads_covered"`  // deleted, because a snapshot covers them
	Tokens   uint64 `json:"tokens_verified"`   // trained tokens of verified payloads
	Receipts uint64 `json:"receipts_verified"` // samples whose payload names the digest of its weights
}

// Files counts files; of snapshots each content once.
type Files struct {
	Whole uint64 `json:"whole"` // read, and equal to their digests
	Bytes uint64 `json:"bytes"` // of those
}

// Segments counts payload files.
type Segments struct {
	Whole   uint64 `json:"whole"`
	Covered uint64 `json:"covered"` // deleted, because a snapshot covers them
	Bytes   uint64 `json:"bytes"`   // of whole ones
}

// Break is one inconsistency. Kind is for programs; fields that do not apply are omitted.
type Break struct {
	Kind    string  `json:"kind"`
	Run     string  `json:"run"`
	Step    uint64  `json:"step,omitempty"`
	Group   string  `json:"group,omitempty"` // epoch/index
	Attempt *uint32 `json:"attempt,omitempty"`
	Sample  *uint32 `json:"sample,omitempty"`
	Segment uint32  `json:"segment,omitempty"`
	Offset  *uint64 `json:"offset,omitempty"`
	Message string  `json:"message"`
}

// Check audits the rows.
func Check(e *Evidence) *Report {
	r := newRows(e)
	f := newFindings(r)
	if e.Ledger == nil {
		checkWithoutLedger(r, f)
	} else {
		steps, groups, samples := stepCheck{r, f}, groupCheck{r, f}, sampleCheck{r, f}
		steps.chain()
		groups.prompts()
		samples.records()
		steps.windows()
		steps.batches()
		groups.counts()
		if e.Unscheduled {
			f.report.Skipped = unscheduled
		} else {
			checkRun(r, f)
		}
		samples.segments()
	}
	f.report.Whole = len(f.report.Breaks) == 0
	return f.report
}

// unscheduled are the checks that need the scheduler's run.
var unscheduled = []Skipped{
	{"plan", "no plan pins the number of rows, steps and samples per group, so the ledger's settings are not compared with one"},
	{"cursor", "no scheduler issued the prompts, so a prompt without samples is not noticed"},
	{"run", "no run records its final step and weights, so the last step of the ledger is not compared with them"},
	{"snapshots", "the scheduler takes snapshots, so this ledger has none"},
}

// checkRun compares the ledger with the scheduler's run and its snapshots, and checks the files of
// both.
func checkRun(r *rows, f *findings) {
	groups, snapshots := groupCheck{r, f}, snapshotCheck{r, f}
	groups.cursor()
	groups.run()
	snapshots.records()
	snapshots.files()
	weightsCheck{r, f}.files()
}

// checkWithoutLedger accepts a run without a ledger only if it never began.
func checkWithoutLedger(r *rows, f *findings) {
	began := r.Run.GetStep() > 0 && r.Run.GetFromSnapshot() == "" || r.Run.GetWeightsDigest() != ""
	if began || r.succeeded() {
		f.add(Break{Step: r.Run.GetStep()}, "LEDGER_MISSING", "the run made %d steps and has no ledger", r.Run.GetStep())
	}
}
