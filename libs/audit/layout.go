package audit

import (
	"cmp"
	"fmt"
	"slices"
	"sort"

	"github.com/rollout-rl/rollout/libs/refusal"
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

// index is the evidence, with what the checks look up. It has a few bytes per step and per version
// of the weights, and nothing per group.
type index struct {
	*Evidence
	layout
	named   map[uint64]*bufferv1.StepRecord // the steps of snapshots
	weights []*bufferv1.WeightsRecord       // by version and lineage
}

func newIndex(e *Evidence) (*index, error) {
	x := &index{Evidence: e, layout: layout{config: e.Ledger.GetConfig()}, named: map[uint64]*bufferv1.StepRecord{}, weights: slices.Clone(e.Weights)}
	for _, s := range e.Snapshots {
		x.named[s.GetStep()] = nil
	}
	slices.SortStableFunc(x.weights, func(v, w *bufferv1.WeightsRecord) int {
		return cmp.Or(cmp.Compare(v.GetVersion(), w.GetVersion()), cmp.Compare(v.GetLineage(), w.GetLineage()))
	})
	err := e.rows().Steps(func(s *bufferv1.StepRecord) error {
		if last := len(x.steps) - 1; last >= 0 && x.steps[last].number == s.GetStep() {
			return nil // of duplicate rows the first is in the index
		}
		x.steps = append(x.steps, step{s.GetStep(), s.GetEndPosition(), s.GetChain() != ""})
		if _, ok := x.named[s.GetStep()]; ok {
			x.named[s.GetStep()] = s
		}
		return nil
	})
	return x, err
}

// ofVersion returns the recorded weights of a version, by lineage.
func (x *index) ofVersion(version uint64) []*bufferv1.WeightsRecord {
	from, _ := slices.BinarySearchFunc(x.weights, version, func(w *bufferv1.WeightsRecord, v uint64) int { return cmp.Compare(w.GetVersion(), v) })
	to := from
	for to < len(x.weights) && x.weights[to].GetVersion() == version {
		to++
	}
	return x.weights[from:to]
}

// digest returns the digest of a version in a lineage.
func (x *index) digest(version uint64, lineage uint32) (digest string, known bool) {
	for _, w := range x.ofVersion(version) {
		if w.GetLineage() == lineage {
			digest, known = w.GetDigest(), true
		}
	}
	return digest, known
}

// recorded reports whether a version has a digest in some lineage: samples of lost weights name it.
func (x *index) recorded(version uint64, digest string) bool {
	return slices.ContainsFunc(x.ofVersion(version), func(w *bufferv1.WeightsRecord) bool { return w.GetDigest() == digest })
}

// current returns the digest of a version in its newest lineage; "" if it has none.
func (x *index) current(version uint64) string {
	lineage := uint32(0)
	for _, l := range slices.Backward(x.Lineages) {
		if l.GetFirstVersion() <= version {
			lineage = l.GetLineage()
			break
		}
	}
	digest, _ := x.digest(version, lineage)
	return digest
}

// state returns the short name of the run's state; without a run, "".
func (x *index) state() string {
	if x.Unscheduled {
		return ""
	}
	return x.Run.GetState().String()[len("RUN_STATE_"):]
}

func (x *index) succeeded() bool { return x.Run.GetState() == runv1.RunState_RUN_STATE_SUCCEEDED }

// stopped reports whether a gate ended the run before its last step, so that groups may remain.
func (x *index) stopped() bool {
	return x.succeeded() && x.Run.GetReason() == refusal.StoppedByGate && x.Run.GetStep() < x.Run.GetPlan().GetConfig().GetTrain().GetSteps()
}

// layout maps prompts to positions, and positions to the steps that consume them.
type layout struct {
	config *bufferv1.LedgerConfig
	steps  []step // by number
}

// step is what is looked up of a recorded step.
type step struct {
	number, end uint64
	committed   bool
}

// find returns a recorded step; the zero step if it is not recorded.
func (l layout) find(number uint64) (_ step, recorded bool) {
	i, recorded := slices.BinarySearchFunc(l.steps, number, func(s step, n uint64) int { return cmp.Compare(s.number, n) })
	if !recorded {
		return step{}, false
	}
	return l.steps[i], true
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
		i := sort.Search(len(l.steps), func(i int) bool { return l.steps[i].number > step })
		if i == 0 {
			return l.begin()
		}
		return l.steps[i-1].end
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
	return first + uint64(sort.Search(len(l.steps), func(i int) bool { return l.steps[i].end > position }))
}

// complete reports whether a step may take taken groups while excluding skipped ones.
func (l layout) complete(taken, skipped uint32) bool {
	want := l.config.GetGroupsPerStep()
	if !l.dynamic() {
		return taken+skipped == want
	}
	return taken == want || l.config.GetPartial() && taken > 0 && taken+skipped == want*l.config.GetDrawBatches()
}
