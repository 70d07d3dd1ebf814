package scheduler

import (
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// Window decides how far a run may be issued and which weights may sample a group. All methods are pure.
//
//	outstanding = issued - consumed - excluded  (in flight + ready + leased)
//	issue while outstanding < (staleness + 1) * groups a step, and positions remain
//
// So at most staleness + 1 windows are between issue and commit: a group sampled by the newest weights of the moment it was issued
// and consumed in its turn is at most staleness steps old. What is overtaken by others the buffer dissolves when it would be older,
// and it comes back as a new attempt.
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
	data := c.GetAlgorithm().GetSft() != nil
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

// Upto is the position up to which may be issued now (exclusive), at least next.
func (w Window) Upto(next, consumed, excluded uint64) uint64 {
	if w.Steps <= w.FirstStep {
		return next
	}
	end := w.First + (w.Steps-w.FirstStep)*w.GroupsPerStep // an excluded group counts for the step that goes without it
	room := w.First + consumed + excluded + (w.Staleness+1)*w.GroupsPerStep
	return max(next, min(end, room))
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
		GroupSize:     c.GetSampling().GetGroupSize(),
		Order:         order,
		MaxStaleness:  c.GetStaleness().GetMaxSteps(),
		Rows:          rows,
		Receipts:      !w.Data,
		GroupAttempts: c.GetLimits().GetGroupAttempts(),
		FirstPosition: w.First,
		FirstStep:     w.FirstStep,
	}
}
