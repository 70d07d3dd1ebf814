package audit

import (
	"cmp"
	"fmt"
	"slices"
	"sort"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Short names of group states.
const (
	open      = bufferv1.GroupState_GROUP_STATE_OPEN
	ready     = bufferv1.GroupState_GROUP_STATE_READY
	leased    = bufferv1.GroupState_GROUP_STATE_LEASED
	consumed  = bufferv1.GroupState_GROUP_STATE_CONSUMED
	excluded  = bufferv1.GroupState_GROUP_STATE_EXCLUDED
	dissolved = bufferv1.GroupState_GROUP_STATE_DISSOLVED
)

// zeroAdvantage is the reason for which dynamic sampling excludes a group: all its rewards are
// equal.
const zeroAdvantage = "ZERO_ADVANTAGE"

// rows indexes the evidence. Of duplicate rows the first is in the index.
type rows struct {
	*Evidence
	layout
	stepOf    map[uint64]*bufferv1.StepRecord
	weightsOf map[uint64]map[uint32]string        // digest by version and lineage
	groupAt   map[uint64]*bufferv1.GroupRecord    // by position
	samplesAt map[uint64][]*bufferv1.SampleRecord // by position, in the order of the batch
}

func newRows(e *Evidence) *rows {
	r := &rows{
		Evidence: e, layout: layout{e.Ledger.GetConfig(), e.Steps}, stepOf: map[uint64]*bufferv1.StepRecord{}, weightsOf: map[uint64]map[uint32]string{},
		groupAt: map[uint64]*bufferv1.GroupRecord{}, samplesAt: map[uint64][]*bufferv1.SampleRecord{},
	}
	for _, s := range e.Steps {
		if r.stepOf[s.GetStep()] == nil {
			r.stepOf[s.GetStep()] = s
		}
	}
	for _, w := range e.Weights {
		if r.weightsOf[w.GetVersion()] == nil {
			r.weightsOf[w.GetVersion()] = map[uint32]string{}
		}
		r.weightsOf[w.GetVersion()][w.GetLineage()] = w.GetDigest()
	}
	for _, g := range e.Groups {
		if r.groupAt[g.GetPosition()] == nil {
			r.groupAt[g.GetPosition()] = g
		}
	}
	for _, s := range e.Samples {
		p := r.position(s)
		r.samplesAt[p] = append(r.samplesAt[p], s)
	}
	for _, list := range r.samplesAt {
		slices.SortStableFunc(list, func(x, y *bufferv1.SampleRecord) int {
			return cmp.Or(cmp.Compare(x.GetRef().GetKey().GetSample(), y.GetRef().GetKey().GetSample()),
				cmp.Compare(x.GetRef().GetKey().GetPart(), y.GetRef().GetKey().GetPart()))
		})
	}
	return r
}

// recorded reports whether a version has a digest in some lineage: samples of lost weights name it.
func (r *rows) recorded(version uint64, digest string) bool {
	for _, known := range r.weightsOf[version] {
		if known == digest {
			return true
		}
	}
	return false
}

// current returns the digest of a version in its newest lineage; "" if it has none.
func (r *rows) current(version uint64) string {
	for _, l := range slices.Backward(r.Lineages) {
		if l.GetFirstVersion() <= version {
			return r.weightsOf[version][l.GetLineage()]
		}
	}
	return r.weightsOf[version][0]
}

// state returns the short name of the run's state; without a run, "".
func (r *rows) state() string {
	if r.Unscheduled {
		return ""
	}
	return r.Run.GetState().String()[len("RUN_STATE_"):]
}

func (r *rows) succeeded() bool { return r.Run.GetState() == runv1.RunState_RUN_STATE_SUCCEEDED }

// layout maps prompts to positions, and positions to the steps that consume them.
type layout struct {
	config *bufferv1.LedgerConfig
	steps  []*bufferv1.StepRecord
}

func (l layout) position(s *bufferv1.SampleRecord) uint64 {
	k := s.GetRef().GetKey()
	return uint64(k.GetEpoch())*l.config.GetRows() + k.GetIndex()
}

// name returns the epoch and index of a position.
func (l layout) name(position uint64) string {
	return fmt.Sprintf("%d/%d", position/l.config.GetRows(), position%l.config.GetRows())
}

// positional reports whether steps consume positions in order.
func (l layout) positional() bool {
	return l.config.GetOrder() == bufferv1.LeaseOrder_LEASE_ORDER_POSITION
}

// dynamic reports whether the window of a step grows past excluded groups (dynamic sampling): its
// end is then in its record.
func (l layout) dynamic() bool { return l.config.GetDrawBatches() > 0 }

// begin returns the first position of the first step. If leases go by completion: how many
// positions the steps before it had used.
func (l layout) begin() uint64 { return l.config.GetFirstPosition() + l.config.GetCarried() }

// carried reports whether a step before the run used the group, according to the snapshot that the
// ledger began with.
func (l layout) carried(g *bufferv1.GroupRecord) bool {
	return l.config.GetSeed() != nil && g.GetStep() > 0 && g.GetStep() <= l.config.GetFirstStep()
}

// end returns the first position after the window of a step; with dynamic sampling, of the last
// recorded step that is not later.
func (l layout) end(step uint64) uint64 {
	if step <= l.config.GetFirstStep() {
		return l.begin()
	}
	if l.dynamic() {
		for _, s := range slices.Backward(l.steps) {
			if s.GetStep() <= step {
				return s.GetEndPosition()
			}
		}
		return l.begin()
	}
	return l.begin() + (step-l.config.GetFirstStep())*uint64(l.config.GetGroupsPerStep())
}

// window returns the step whose window contains a position.
func (l layout) window(position uint64) uint64 {
	first := l.config.GetFirstStep() + 1
	if position < l.config.GetFirstPosition() {
		return first
	}
	if !l.dynamic() {
		return first + (position-l.config.GetFirstPosition())/uint64(l.config.GetGroupsPerStep())
	}
	return first + uint64(sort.Search(len(l.steps), func(i int) bool { return l.steps[i].GetEndPosition() > position }))
}

// complete reports whether a step may take taken groups while excluding skipped ones.
func (l layout) complete(taken, skipped uint32) bool {
	want := l.config.GetGroupsPerStep()
	if !l.dynamic() {
		return taken+skipped == want
	}
	return taken == want || l.config.GetPartial() && taken > 0 && taken+skipped == want*l.config.GetDrawBatches()
}

// findings collects breaks in the report.
type findings struct {
	rows   *rows
	report *Report
}

func newFindings(r *rows) *findings {
	state := r.Ledger.GetState()
	return &findings{r, &Report{
		RunID: r.Run.GetRunId(), Name: r.Run.GetName(), State: r.state(), Chain: r.Ledger.GetChain(),
		Excluded: map[string]int{}, Breaks: []Break{}, Epochs: []Epoch{}, Lineages: []Lineage{}, Skipped: []Skipped{},
		Counts: map[string]int64{
			"duplicates_dropped": int64(state.GetDuplicates()), "refused": int64(state.GetRefused()), "infra_failed": int64(state.GetInfraFailed()),
		},
	}}
}

// add completes a break and adds it.
func (f *findings) add(b Break, kind, format string, args ...any) {
	b.Kind, b.Run, b.Message = kind, f.report.RunID, fmt.Sprintf(format, args...)
	f.report.Breaks = append(f.report.Breaks, b)
}

func (f *findings) ofGroup(g *bufferv1.GroupRecord) Break {
	attempt := g.GetKey().GetAttempt()
	return Break{Group: f.rows.name(g.GetPosition()), Step: g.GetStep(), Attempt: &attempt}
}

func (f *findings) ofSample(s *bufferv1.SampleRecord) Break {
	k, offset, position := s.GetRef().GetKey(), s.GetRef().GetOffset(), f.rows.position(s)
	attempt, sample := k.GetAttempt(), k.GetSample()
	b := Break{Group: f.rows.name(position), Attempt: &attempt, Sample: &sample, Segment: s.GetSegment(), Step: f.rows.groupAt[position].GetStep()}
	if s.GetSegment() > 0 {
		b.Offset = &offset
	}
	return b
}
