// Package issue decides how far a run may be issued, and publishes its prompt groups.
package issue

import (
	"github.com/rollout-rl/rollout/libs/algorithm"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// Window decides how far a run may be issued, and which weights may sample a group. All methods are
// pure.
//
//	issue up to the end of window (committed steps + staleness + 1); a window is the groups of one step
//
// In sync mode the position of a group determines the weights that sample it, and with training
// data no weights are involved. In both cases the next window opens when a batch is leased, so that
// workers have its prompts before the new weights arrive.
//
// In flight + ready therefore never exceeds (staleness + 1) * groups per step, and a group that is
// sampled without delay and consumed in order is at most staleness steps old. The buffer dissolves
// a group before it becomes older, and the group comes back as a new attempt. An excluded group
// counts for the step in which it is missing.
//
// With dynamic sampling (Draw > 0) another group is issued in place of each excluded one, and the
// start of a step follows from the counts of the ledger: see Refill.
type Window struct {
	First         uint64 // first position of the run
	FirstStep     uint64 // steps before the run, from the snapshot that it was restored from
	Carried       uint64 // groups from First on that those steps used
	Steps         uint64 // steps of the plan
	GroupsPerStep uint64
	Staleness     uint64
	Data          bool // tokens come from data: no weights, no staleness
	Sync          bool
	Completion    bool   // a batch takes the groups that were complete first, otherwise the groups of its window
	Draw          uint64 // dynamic sampling: the windows of groups that one step may use; 0: off
}

// NewWindow reads the plan. first and firstStep are those of the snapshot that the run starts from,
// or 0.
func NewWindow(plan *planv1.Plan, first, firstStep uint64) Window {
	c := plan.GetConfig()
	data := algorithm.FromData(c)
	sync := c.GetMode() != "async"
	return Window{
		First: first, FirstStep: firstStep,
		Steps:         c.GetTrain().GetSteps(),
		GroupsPerStep: uint64(c.GetTrain().GetGroupsPerStep()),
		Staleness:     uint64(c.GetStaleness().GetMaxSteps()),
		Data:          data, Sync: sync,
		Completion: !sync && !data,
		Draw:       uint64(algorithm.DrawBatches(c)),
	}
}

// Upto is the position up to which groups may be issued now (exclusive), at least next. step is the
// last committed step; leased means that the learner has the batch of the step after it.
func (w Window) Upto(next, step uint64, leased bool) uint64 {
	step = max(step, w.FirstStep)
	if leased && (w.Sync || w.Data) {
		step++
	}
	return max(next, w.start(min(step+w.Staleness+1, w.Steps)))
}

// Refill is Upto with dynamic sampling: the groups in flight and ready are as many as the steps
// within staleness need, regardless of exclusions. In order of position, no group is issued beyond
// what the next step may use, so that each group is sampled by the weights of its step.
func (w Window) Refill(next uint64, ledger *bufferv1.LedgerState) uint64 {
	step, begin := w.Made(ledger), w.begin(ledger)
	waiting := ledger.GetExcluded() - ledger.GetSkipped() // excluded, but not skipped by a step yet
	if w.Completion {
		begin -= ledger.GetLeased() // they are in flight
		return max(next, begin+waiting+min(w.Staleness+1, w.Steps-min(step, w.Steps))*w.GroupsPerStep)
	}
	if step >= w.Steps {
		return next
	}
	return max(next, begin+min(w.GroupsPerStep+waiting, w.Draw*w.GroupsPerStep))
}

// begin is the first position of the step after the last leased one, with dynamic sampling: each
// position before it is part of a step or was skipped by one.
func (w Window) begin(ledger *bufferv1.LedgerState) uint64 {
	return w.First + ledger.GetConsumed() + ledger.GetLeased() + ledger.GetSkipped()
}

// Made is the version of the weights that sample what is issued now: the committed steps, and in
// sync mode with dynamic sampling the step of the leased batch.
func (w Window) Made(ledger *bufferv1.LedgerState) uint64 {
	step := max(ledger.GetStep(), w.FirstStep)
	if w.Draw > 0 && w.Sync && ledger.GetLeased() > 0 {
		step++
	}
	return step
}

// Within limits a position so that at most `most` groups are issued and not done. The groups of one
// step are always allowed.
func (w Window) Within(upto, next, done, most uint64) uint64 {
	return max(next, min(upto, w.First+done+max(most, w.GroupsPerStep)))
}

// start is the first position of the window that follows this many steps.
func (w Window) start(steps uint64) uint64 {
	if steps <= w.FirstStep {
		return w.First + w.Carried
	}
	return w.First + w.Carried + (steps-w.FirstStep)*w.GroupsPerStep
}

// MinVersion is the oldest weights version that may sample the group at a position. newest is the
// last committed step, or Made with dynamic sampling.
func (w Window) MinVersion(position, newest uint64) uint64 {
	switch {
	case w.Data:
		return 0
	case w.Sync && w.Draw > 0:
		return newest
	case w.Sync:
		return w.FirstStep + (position-w.First)/w.GroupsPerStep
	case newest < w.FirstStep+w.Staleness:
		return w.FirstStep
	}
	return newest - w.Staleness
}

// LedgerConfig is the part of the plan that the buffer needs.
func (w Window) LedgerConfig(plan *planv1.Plan, rows uint64) *bufferv1.LedgerConfig {
	c := plan.GetConfig()
	order := bufferv1.LeaseOrder_LEASE_ORDER_POSITION
	if w.Completion {
		order = bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION
	}
	return &bufferv1.LedgerConfig{
		GroupsPerStep: c.GetTrain().GetGroupsPerStep(),
		GroupSize:     algorithm.GroupSize(c),
		MinGroupSize:  c.GetLimits().GetMinGroupSize(),
		Order:         order,
		MaxStaleness:  c.GetStaleness().GetMaxSteps(),
		Rows:          rows,
		Receipts:      !w.Data,
		External:      algorithm.External(c),
		GroupAttempts: c.GetLimits().GetGroupAttempts(),
		FirstPosition: w.First,
		FirstStep:     w.FirstStep,
		DrawBatches:   uint32(w.Draw),
		Partial:       w.Draw > 0 && c.GetSampling().GetRefillShortfall() == "train",
	}
}
