// Package audit proves a run from its ledger: that each prompt of each epoch was consumed once or excluded for a reason, that
// steps, batches and weights form one chain, that every trained token was sampled by recorded weights, and that the payloads are
// what was written. It is a pure function of the rows (Evidence); where they come from is gather.go's.
//
// What it computes itself it computes from docs/wire.md, not with the buffer's code: a mistake there shall not hide itself.
package audit

import (
	"cmp"
	"fmt"
	"slices"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Evidence is all rows that speak of a run.
type Evidence struct {
	Run       *runv1.Run
	Ledger    *bufferv1.LedgerRecord // nil: there is none
	Segments  []*bufferv1.SegmentRecord
	Weights   []*bufferv1.WeightsRecord
	Steps     []*bufferv1.StepRecord
	Groups    []*bufferv1.GroupRecord
	Samples   []*bufferv1.SampleRecord
	Snapshots []*snapshotv1.Snapshot
	Missing   []string // content ids of files of the run's snapshots that are not there
	Corrupt   []string // and of those that hold other bytes
	Files     Files    // of the run's snapshots, that were read
	// The scheduler's cursor before and after the ledger was read: a run that goes on moves it meanwhile.
	CursorBefore, CursorAfter uint64
}

// Report is what the rows prove, and what breaks the proof.
type Report struct {
	RunID    string           `json:"run_id"`
	Name     string           `json:"name"`
	State    string           `json:"state"`
	Whole    bool             `json:"whole"` // no breaks
	Steps    uint64           `json:"steps"` // committed, this run's own
	Chain    string           `json:"chain"`
	Digest   string           `json:"weights_digest"`
	Epochs   []Epoch          `json:"epochs"`
	Excluded map[string]int   `json:"excluded"` // groups by reason
	Samples  Samples          `json:"samples"`
	Segments Segments         `json:"segments"`
	Files    Files            `json:"snapshot_files"`
	Counts   map[string]int64 `json:"counts"` // dropped twins, refused and failed samples, as the ledger counted them
	Breaks   []Break          `json:"breaks"`
}

// Epoch counts the prompts of one pass over the dataset.
type Epoch struct {
	Epoch     uint64 `json:"epoch"`
	Consumed  uint64 `json:"consumed"`
	Excluded  uint64 `json:"excluded"`
	InFlight  uint64 `json:"in_flight"`   // issued, not settled yet
	NotIssued uint64 `json:"not_reached"` // not issued
}

// Samples counts trained samples.
type Samples struct {
	Trained  uint64 `json:"trained"`
	Verified uint64 `json:"payloads_verified"` // read, and checked against ledger and weights
	Covered  uint64 `json:"payloads_covered"`  // dropped, because a snapshot covers them
	Tokens   uint64 `json:"tokens_verified"`   // trained ones among the verified
	Receipts uint64 `json:"receipts_verified"` // samples whose payload names the digest of the weights that sampled it
}

// Files counts files of snapshots, each content once.
type Files struct {
	Whole uint64 `json:"whole"` // read, and what their digests say
	Bytes uint64 `json:"bytes"` // of those
}

// Segments counts payload files.
type Segments struct {
	Whole   uint64 `json:"whole"`
	Covered uint64 `json:"covered"` // dropped, because a snapshot covers them
	Bytes   uint64 `json:"bytes"`   // of whole ones
}

// Break is one thing that breaks the proof. Kind is for machines; what is not known is left out.
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

// Check examines the rows.
func Check(e *Evidence) *Report {
	a := newAuditor(e)
	if e.Ledger == nil {
		a.withoutLedger()
		return a.report
	}
	a.checkSteps()
	a.checkGroups()
	a.checkSamples()
	a.checkDraws()
	a.checkBatches()
	a.checkCounts()
	a.checkCursor()
	a.checkRun()
	a.checkSnapshots()
	a.checkState()
	a.checkSegments()
	a.report.Whole = len(a.report.Breaks) == 0
	return a.report
}

// withoutLedger judges a run that has none: one that never began lost nothing.
func (a *auditor) withoutLedger() {
	begun := a.Run.GetStep() > 0 && a.Run.GetFromSnapshot() == "" || a.Run.GetWeightsDigest() != ""
	if begun || a.succeeded() {
		a.flag(Break{Step: a.Run.GetStep()}, "LEDGER_MISSING", "the run made %d steps and has no ledger", a.Run.GetStep())
	}
	a.report.Whole = len(a.report.Breaks) == 0
}

// auditor holds the rows by what they are looked up by.
type auditor struct {
	*Evidence
	report  *Report
	config  *bufferv1.LedgerConfig
	steps   map[uint64]*bufferv1.StepRecord
	weights map[uint64]string
	groups  map[uint64]*bufferv1.GroupRecord
	samples map[uint64][]*bufferv1.SampleRecord // by position, in the batch's order
}

func newAuditor(e *Evidence) *auditor {
	a := &auditor{
		Evidence: e, config: e.Ledger.GetConfig(), steps: map[uint64]*bufferv1.StepRecord{}, weights: map[uint64]string{},
		groups: map[uint64]*bufferv1.GroupRecord{}, samples: map[uint64][]*bufferv1.SampleRecord{},
	}
	a.report = &Report{
		RunID: e.Run.GetRunId(), Name: e.Run.GetName(), State: e.Run.GetState().String()[len("RUN_STATE_"):], Chain: e.Ledger.GetChain(),
		Excluded: map[string]int{}, Breaks: []Break{}, Epochs: []Epoch{},
		Counts: map[string]int64{
			"twins_dropped": int64(e.Ledger.GetState().GetDuplicates()), "refused": int64(e.Ledger.GetState().GetRefused()),
			"infra_failed": int64(e.Ledger.GetState().GetInfraFailed()),
		},
	}
	for _, w := range e.Weights {
		a.weights[w.GetVersion()] = w.GetDigest()
	}
	for _, s := range e.Samples {
		p := a.position(s)
		a.samples[p] = append(a.samples[p], s)
	}
	for _, list := range a.samples {
		slices.SortStableFunc(list, func(x, y *bufferv1.SampleRecord) int {
			return cmp.Or(cmp.Compare(x.GetRef().GetKey().GetSample(), y.GetRef().GetKey().GetSample()),
				cmp.Compare(x.GetRef().GetKey().GetPart(), y.GetRef().GetKey().GetPart()))
		})
	}
	return a
}

func (a *auditor) position(s *bufferv1.SampleRecord) uint64 {
	k := s.GetRef().GetKey()
	return uint64(k.GetEpoch())*a.config.GetRows() + k.GetIndex()
}

// positional reports whether step s takes exactly the window of its positions.
func (a *auditor) positional() bool {
	return a.config.GetOrder() == bufferv1.LeaseOrder_LEASE_ORDER_POSITION
}

// edge is the first position after the windows of so many steps; with draws, as far as they are made.
func (a *auditor) edge(step uint64) uint64 {
	if step <= a.config.GetFirstStep() {
		return a.config.GetFirstPosition()
	}
	if a.draws() {
		for i := len(a.Steps) - 1; i >= 0; i-- {
			if s := a.Steps[i]; s.GetStep() <= step {
				return s.GetEndPosition()
			}
		}
		return a.config.GetFirstPosition()
	}
	return a.config.GetFirstPosition() + (step-a.config.GetFirstStep())*uint64(a.config.GetGroupsPerStep())
}

func (a *auditor) succeeded() bool { return a.Run.GetState() == runv1.RunState_RUN_STATE_SUCCEEDED }

func (a *auditor) name(position uint64) string {
	return fmt.Sprintf("%d/%d", position/a.config.GetRows(), position%a.config.GetRows())
}

// flag adds a break.
func (a *auditor) flag(b Break, kind, format string, args ...any) {
	b.Kind, b.Run, b.Message = kind, a.report.RunID, fmt.Sprintf(format, args...)
	a.report.Breaks = append(a.report.Breaks, b)
}

func (a *auditor) ofGroup(g *bufferv1.GroupRecord) Break {
	attempt := g.GetKey().GetAttempt()
	return Break{Group: a.name(g.GetPosition()), Step: g.GetStep(), Attempt: &attempt}
}

func (a *auditor) ofSample(s *bufferv1.SampleRecord) Break {
	k, offset := s.GetRef().GetKey(), s.GetRef().GetOffset()
	attempt, sample := k.GetAttempt(), k.GetSample()
	b := Break{Group: a.name(a.position(s)), Attempt: &attempt, Sample: &sample, Segment: s.GetSegment(), Step: a.groups[a.position(s)].GetStep()}
	if s.GetSegment() > 0 {
		b.Offset = &offset
	}
	return b
}
