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
type Window struct {
	First         uint64 // first position of the run
	FirstStep     uint64 // steps made before the run (restored from a snapshot)
	Steps         uint64 // steps of the plan
	GroupsPerStep uint64
	Staleness     uint64
	Data          bool // tokens come from data: no weights, no staleness
	Sync          bool
	Completion    bool // a batch takes the groups that were complete first; else those of its own window
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

// start is the first position of the window after so many steps.
func (w Window) start(steps uint64) uint64 {
	if steps <= w.FirstStep {
		return w.First
	}
	return w.First + (steps-w.FirstStep)*w.GroupsPerStep
}

// MinVersion is the oldest weights version that may sample the group at a position, while newest is the last committed step.
func (w Window) MinVersion(position, newest uint64) uint64 {
	switch {
	case w.Data:
		return 0
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
	}
}
