// Package audit verifies a run from the rows of its ledger: each prompt of each epoch was consumed
// once or excluded for a reason; steps, batches and weights form one chain; every trained token was
// sampled by recorded weights; and the files of payloads, snapshots, and published weights are
// unchanged.
//
// Check reads nothing but the evidence. Gather collects it from running services. Memory does not
// depend on the number of groups and samples: they are sorted in temporary files, and read in
// order.
//
// Digests are computed from their specification in docs/wire.md, not with the code of the buffer,
// so that a mistake there can't hide itself.
package audit

import (
	"errors"

	"github.com/rollout-rl/rollout/libs/spill"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Evidence is what is recorded of a run. Close it.
type Evidence struct {
	Run *runv1.Run
	// Unscheduled: the scheduler has no such run, because another program opened the ledger and sent
	// the samples. Run has an id only.
	Unscheduled bool
	Ledger      *bufferv1.LedgerRecord // nil if the run has no ledger
	Segments    []*bufferv1.SegmentRecord
	Weights     []*bufferv1.WeightsRecord
	Lineages    []*bufferv1.LineageRecord
	Rows        *Rows // steps, groups and samples; nil: none
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
	Omitted   uint64           `json:"breaks_omitted"` // further ones, which are not listed
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

// Check audits a run. The error is one of the temporary files.
func Check(e *Evidence) (*Report, error) {
	x, err := newIndex(e)
	if err != nil {
		return nil, err
	}
	c := &check{index: x, report: newReport(x)}
	if e.Ledger == nil {
		c.withoutLedger()
	} else if err := c.ledger(); err != nil {
		return nil, err
	}
	for _, section := range c.sections {
		c.report.Breaks = append(c.report.Breaks, section.breaks...)
	}
	c.report.Whole = len(c.report.Breaks) == 0
	return c.report, nil
}

// check is an audit in progress.
type check struct {
	index    *index
	report   *Report
	sections []*findings // in the order of the report
}

// section begins the next section of the report.
func (c *check) section() *findings {
	f := &findings{index: c.index, report: c.report}
	c.sections = append(c.sections, f)
	return f
}

// ledger checks a run that has a ledger.
func (c *check) ledger() (err error) {
	x := c.index
	if err := (stepCheck{x, c.section()}).chain(); err != nil {
		return err
	}
	placed, taken := &places{sorter: spill.New(x.rows().folder)}, &batches{sorter: spill.New(x.rows().folder)}
	defer func() { err = errors.Join(err, placed.sorter.Close(), taken.sorter.Close()) }()
	totals, err := c.prompts(placed, taken)
	if err != nil {
		return err
	}
	if err := (stepCheck{x, c.section()}).windows(totals.carried); err != nil {
		return err
	}
	if err := (stepCheck{x, c.section()}).batches(taken); err != nil {
		return err
	}
	if err := (segmentCheck{x, c.section()}).shared(placed); err != nil {
		return err
	}
	groupCheck{x, c.section()}.counts(totals.states)
	if x.Unscheduled {
		c.report.Skipped = unscheduled
	} else {
		c.run(totals.end)
	}
	segmentCheck{x, c.section()}.files()
	return nil
}

// totals are sums over all prompts.
type totals struct {
	states  map[bufferv1.GroupState]uint64 // group records
	carried uint64                         // groups that steps before the run excluded
	end     uint64                         // after the last group
}

// prompts reads all prompts once.
func (c *check) prompts(placed *places, taken *batches) (totals, error) {
	x, sum := c.index, totals{states: map[bufferv1.GroupState]uint64{}}
	groups, epochs := groupCheck{x, c.section()}, newEpochCheck(x, c.section())
	samples, sizes, rewards := newSampleCheck(x, c.section()), sizeCheck{x, c.section()}, sizeCheck{x, c.section()}
	err := x.rows().Prompts(func(p *Prompt) error {
		groups.prompt(p)
		epochs.prompt(p)
		samples.prompt(p)
		sizes.prompt(p)
		rewards.equalRewards(p)
		for _, g := range p.Groups {
			sum.states[g.GetState()]++
			if g.GetState() == excluded && x.carried(g) {
				sum.carried++
			}
			sum.end = max(sum.end, p.Position+1)
		}
		return errors.Join(placed.add(p), taken.add(p))
	})
	epochs.finish()
	return sum, err
}

// run compares the ledger, whose groups end at a position, with the scheduler's run and its
// snapshots, and checks the files of both.
func (c *check) run(end uint64) {
	groups, snapshots := groupCheck{c.index, c.section()}, snapshotCheck{c.index, c.section()}
	groups.cursor(end)
	groups.run()
	snapshots.records()
	snapshots.files()
	weightsCheck{c.index, c.section()}.files()
}

// withoutLedger accepts a run without a ledger only if it never began.
func (c *check) withoutLedger() {
	run := c.index.Run
	began := run.GetStep() > 0 && run.GetFromSnapshot() == "" || run.GetWeightsDigest() != ""
	if began || c.index.succeeded() {
		c.section().add(Break{Step: run.GetStep()}, "LEDGER_MISSING", "the run made %d steps and has no ledger", run.GetStep())
	}
}

// unscheduled are the checks that need the scheduler's run.
var unscheduled = []Skipped{
	{"plan", "no plan pins the number of rows, steps and samples per group, so the ledger's settings are not compared with one"},
	{"cursor", "no scheduler issued the prompts, so a prompt without samples is not noticed"},
	{"run", "no run records its final step and weights, so the last step of the ledger is not compared with them"},
	{"snapshots", "the scheduler takes snapshots, so this ledger has none"},
}
