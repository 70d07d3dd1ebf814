package scheduler

import (
	"github.com/rollout-rl/rollout/libs/algorithm"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// Window decides how far a run may be issued and which weights may sample a group. All methods are pure.
//
//	issue up to the end of window (steps committed + staleness + 1), a window being the groups of one step
//
// Where the weights that sample a group follow from its position (sync), or none do (data), the next window opens with the lease
// of a batch already: its prompts lie ready at the workers when their weights come.
//
// So in flight + ready never exceeds (staleness + 1) * groups a step, and a group that is sampled as soon as it may be and
// consumed in its turn is at most staleness steps old. One that others overtake the buffer dissolves before it would be older, and
// it comes back as a new attempt. An excluded group counts for the step that goes without it.
//
// With dynamic sampling (Draw > 0) another group is issued in place of each excluded one instead, and where a step begins follows from
// the ledger's counts: see Refill.
type Window struct {
	First         uint64 // first position of the run
	FirstStep     uint64 // steps made before the run (restored from a snapshot)
	Steps         uint64 // steps of the plan
	GroupsPerStep uint64
	Staleness     uint64
	Data          bool // tokens come from data: no weights, no staleness
	Sync          bool
	Completion    bool   // a batch takes the groups that were complete first; else those of its own window
	Draw          uint64 // windows' worth of groups that a step may go through with dynamic sampling; 0: an excluded group counts for its step
}

// windowOf reads the plan. first and firstStep are those of the snapshot that the run starts from, else 0.
func windowOf(plan *planv1.Plan, first, firstStep uint64) Window {
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

// Upto is the position up to which may be issued now (exclusive), at least next. step is the last committed one; leased tells
// that the batch of the step after it is with the learner.
func (w Window) Upto(next, step uint64, leased bool) uint64 {
	step = max(step, w.FirstStep)
	if leased && (w.Sync || w.Data) {
		step++
	}
	return max(next, w.start(min(step+w.Staleness+1, w.Steps)))
}

// Refill is Upto with dynamic sampling: as many groups are in flight or ready as the steps within staleness want, however many were
// excluded. By position none is issued beyond what the next step may go through, so that each group is sampled by its own step's weights.
func (w Window) Refill(next uint64, ledger *bufferv1.LedgerState) uint64 {
	step, begin := w.made(ledger), w.begin(ledger)
	waiting := ledger.GetExcluded() - ledger.GetSkipped() // they come before a step still
	if w.Completion {
		begin -= ledger.GetLeased() // they are in flight
		return max(next, begin+waiting+min(w.Staleness+1, w.Steps-min(step, w.Steps))*w.GroupsPerStep)
	}
	if step >= w.Steps {
		return next
	}
	return max(next, begin+min(w.GroupsPerStep+waiting, w.Draw*w.GroupsPerStep))
}

// begin is where the step after the last leased one begins, with dynamic sampling: each position before it is in a step, or was
// skipped by one.
func (w Window) begin(ledger *bufferv1.LedgerState) uint64 {
	return w.First + ledger.GetConsumed() + ledger.GetLeased() + ledger.GetSkipped()
}

// made is how many steps have, or will have with the batch that is with the learner, made the weights that sample what is issued now.
func (w Window) made(ledger *bufferv1.LedgerState) uint64 {
	step := max(ledger.GetStep(), w.FirstStep)
	if w.Draw > 0 && w.Sync && ledger.GetLeased() > 0 {
		step++
	}
	return step
}

// Within bounds a position up to which may be issued by the groups that may be issued and not consumed, of which done are over; those
// of one step always may.
func (w Window) Within(upto, next, done, most uint64) uint64 {
	return max(next, min(upto, w.First+done+max(most, w.GroupsPerStep)))
}

// start is the first position of the window after so many steps.
func (w Window) start(steps uint64) uint64 {
	if steps <= w.FirstStep {
		return w.First
	}
	return w.First + (steps-w.FirstStep)*w.GroupsPerStep
}

// MinVersion is the oldest weights version that may sample the group at a position, while newest is the last committed step (with
// dynamic sampling, what made says).
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

// ledgerConfig is what the buffer is told of the run.
func (w Window) ledgerConfig(plan *planv1.Plan, rows uint64) *bufferv1.LedgerConfig {
	c := plan.GetConfig()
	order := bufferv1.LeaseOrder_LEASE_ORDER_POSITION
	if w.Completion {
		order = bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION
	}
	return &bufferv1.LedgerConfig{
		GroupsPerStep: c.GetTrain().GetGroupsPerStep(),
		GroupSize:     algorithm.GroupSize(c),
		Order:         order,
		MaxStaleness:  c.GetStaleness().GetMaxSteps(),
		Rows:          rows,
		Receipts:      !w.Data,
		GroupAttempts: c.GetLimits().GetGroupAttempts(),
		FirstPosition: w.First,
		FirstStep:     w.FirstStep,
		DrawBatches:   uint32(w.Draw),
		Partial:       w.Draw > 0 && c.GetSampling().GetRefillShortfall() == "train",
	}
}
