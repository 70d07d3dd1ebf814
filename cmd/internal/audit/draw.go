package audit

import (
	"sort"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// zeroAdvantage is why dynamic sampling leaves a group out: all of its rewards are equal.
const zeroAdvantage = "ZERO_ADVANTAGE"

// draws reports whether steps go past excluded groups to others in their place: a step's window is then as long as its record says.
func (a *auditor) draws() bool { return a.config.GetDrawBatches() > 0 }

// window is the step that a position belongs to, where steps take their positions in order.
func (a *auditor) window(position uint64) uint64 {
	first := a.config.GetFirstStep() + 1
	if position < a.config.GetFirstPosition() {
		return first
	}
	if !a.draws() {
		return first + (position-a.config.GetFirstPosition())/uint64(a.config.GetGroupsPerStep())
	}
	return first + uint64(sort.Search(len(a.Steps), func(i int) bool { return a.Steps[i].GetEndPosition() > position }))
}

// checkDraws holds the windows of steps together, and what was left out against its rewards.
func (a *auditor) checkDraws() {
	if !a.draws() {
		return
	}
	end, skipped := a.config.GetFirstPosition(), uint64(0)
	for _, s := range a.Steps {
		end += uint64(s.GetGroups()) + uint64(s.GetExcluded())
		skipped += uint64(s.GetExcluded())
		if s.GetEndPosition() != end {
			a.flag(Break{Step: s.GetStep()}, "STEP_WINDOW", "step %d ends at position %d by its record; the groups of the steps through it end at %d",
				s.GetStep(), s.GetEndPosition(), end)
		}
	}
	if told := a.Ledger.GetState().GetSkipped(); told != skipped {
		a.flag(Break{}, "LEDGER_COUNTS", "the ledger counts %d excluded groups before its last step, its steps went without %d", told, skipped)
	}
	for _, g := range a.Groups {
		if g.GetState() == excluded && g.GetReason() == zeroAdvantage {
			a.checkEqual(g)
		}
	}
}

// checkEqual looks at the rewards of a group that was left out because they are equal.
func (a *auditor) checkEqual(g *bufferv1.GroupRecord) {
	all := a.samples[g.GetPosition()]
	if len(all) == 0 {
		return // checkSize told of it
	}
	for _, s := range all {
		if one, other := all[0].GetRef().GetReward(), s.GetRef().GetReward(); one != other {
			a.flag(a.ofSample(s), "EXCLUDED_UNEQUAL", "it was left out because all rewards are equal; %v and %v are not", one, other)
			return
		}
	}
}

// fits reports whether a step of n groups that goes without m has as many as it should.
func (a *auditor) fits(n, m uint32) bool {
	want := a.config.GetGroupsPerStep()
	if !a.draws() {
		return n+m == want
	}
	return n == want || a.config.GetPartial() && n > 0 && n+m == want*a.config.GetDrawBatches()
}

// reach is how far the cursor may be with draws.
func (a *auditor) reach() uint64 {
	s, want, total := a.Ledger.GetState(), uint64(a.config.GetGroupsPerStep()), a.Run.GetPlan().GetConfig().GetTrain().GetSteps()
	step := max(s.GetStep(), a.config.GetFirstStep())
	if !a.positional() {
		ahead := min(uint64(a.config.GetMaxStaleness())+1, total-min(step, total))
		return a.config.GetFirstPosition() + s.GetConsumed() + s.GetExcluded() + ahead*want
	}
	begin := a.config.GetFirstPosition() + s.GetConsumed() + s.GetLeased() + s.GetSkipped()
	if s.GetLeased() > 0 {
		step++
	}
	if step >= total {
		return begin
	}
	return begin + min(want+s.GetExcluded()-s.GetSkipped(), want*uint64(a.config.GetDrawBatches()))
}
