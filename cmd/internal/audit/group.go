package audit

import (
	"slices"

	"github.com/rollout-rl/rollout/libs/algorithm"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// Short names of states.
const (
	open      = bufferv1.GroupState_GROUP_STATE_OPEN
	ready     = bufferv1.GroupState_GROUP_STATE_READY
	leased    = bufferv1.GroupState_GROUP_STATE_LEASED
	consumed  = bufferv1.GroupState_GROUP_STATE_CONSUMED
	excluded  = bufferv1.GroupState_GROUP_STATE_EXCLUDED
	dissolved = bufferv1.GroupState_GROUP_STATE_DISSOLVED
)

// checkGroups looks at each prompt: one row each, settled once, in its turn.
func (a *auditor) checkGroups() {
	for _, g := range a.Groups {
		if other, twice := a.groups[g.GetPosition()]; twice {
			a.flag(a.ofGroup(g), "GROUP_TWICE", "the prompt was consumed or excluded twice: by step %d and by step %d", other.GetStep(), g.GetStep())
			continue
		}
		a.groups[g.GetPosition()] = g
		a.checkGroup(g)
	}
	a.countEpochs()
}

func (a *auditor) checkGroup(g *bufferv1.GroupRecord) {
	at, p := a.ofGroup(g), g.GetPosition()
	if k := g.GetKey(); uint64(k.GetEpoch())*a.config.GetRows()+k.GetIndex() != p || p < a.config.GetFirstPosition() {
		a.flag(at, "GROUP_MISPLACED", "group %d/%d stands at position %d", k.GetEpoch(), k.GetIndex(), p)
	}
	window := a.window(p)
	step := a.steps[g.GetStep()]
	committed := step.GetWeightsDigest() != ""
	switch g.GetState() {
	case consumed:
		if !committed {
			a.flag(at, "CONSUMED_BY_NO_STEP", "it counts as consumed by step %d, which was not committed", g.GetStep())
		}
	case leased:
		if step == nil || committed {
			a.flag(at, "LEASED_BY_NO_STEP", "it counts as leased for step %d, which is not under way", g.GetStep())
		}
	case excluded:
		a.report.Excluded[g.GetReason()]++
		if g.GetReason() == "" {
			a.flag(at, "EXCLUDED_WITHOUT_REASON", "it was excluded and nobody said why")
		}
	case open, ready, dissolved:
		if a.positional() && window <= a.Ledger.GetState().GetStep() {
			a.flag(at, "NOT_CONSUMED", "its step %d is committed, but the group is %s", window, g.GetState().String()[len("GROUP_STATE_"):])
		}
		if g.GetState() == dissolved && g.GetReason() == "" {
			a.flag(at, "DISSOLVED_WITHOUT_REASON", "its attempt was given up and nobody said why")
		}
	default:
		a.flag(at, "GROUP_STATE_UNKNOWN", "its state is %d", g.GetState())
	}
	if taken := g.GetStep() > 0; a.positional() && taken && g.GetStep() != window {
		a.flag(at, "WRONG_STEP", "step %d took it, the prompt is step %d's", g.GetStep(), window)
	}
}

// countEpochs counts prompts, and finds those that have no row although they must.
func (a *auditor) countEpochs() {
	rows, first := a.config.GetRows(), a.config.GetFirstPosition()
	end := a.edge(a.Run.GetPlan().GetConfig().GetTrain().GetSteps())
	settled := a.edge(a.Ledger.GetState().GetStep()) // before it nothing may be missing
	if !a.positional() {
		settled = first
	}
	if a.draws() { // where the last step will end is not known, and by completion some groups may be left over
		end = max(end, a.CursorAfter)
	} else if a.succeeded() {
		settled = end
	}
	for p := first; p < end; p++ {
		if e := p / rows; len(a.report.Epochs) == 0 || a.report.Epochs[len(a.report.Epochs)-1].Epoch != e {
			a.report.Epochs = append(a.report.Epochs, Epoch{Epoch: e})
		}
		count := &a.report.Epochs[len(a.report.Epochs)-1]
		g := a.groups[p]
		switch {
		case g.GetState() == consumed:
			count.Consumed++
			continue
		case g.GetState() == excluded:
			count.Excluded++
			continue
		case p < a.CursorAfter:
			count.InFlight++
		default:
			count.NotIssued++
		}
		switch {
		case p >= settled:
		case g == nil:
			a.flag(Break{Group: a.name(p)}, "GROUP_MISSING", "position %d has no row: the prompt was skipped, or its row is lost", p)
		case a.succeeded():
			a.flag(a.ofGroup(g), "NOT_CONSUMED", "the run is done, but the group is %s", g.GetState().String()[len("GROUP_STATE_"):])
		}
	}
}

// checkCounts compares the ledger's own numbers with the rows.
func (a *auditor) checkCounts() {
	rows := map[bufferv1.GroupState]uint64{}
	for _, g := range a.Groups {
		rows[g.GetState()]++
	}
	s := a.Ledger.GetState()
	for _, c := range []struct {
		state bufferv1.GroupState
		told  uint64
	}{
		{open, s.GetOpen()}, {ready, s.GetReady()}, {leased, s.GetLeased()}, {consumed, s.GetConsumed()}, {excluded, s.GetExcluded()},
		{dissolved, uint64(len(s.GetDissolved()))},
	} {
		if rows[c.state] != c.told {
			a.flag(Break{}, "LEDGER_COUNTS", "the ledger counts %d groups as %s, its rows are %d", c.told, c.state.String()[len("GROUP_STATE_"):], rows[c.state])
		}
	}
}

// checkCursor holds the scheduler's place against the ledger.
func (a *auditor) checkCursor() {
	last := uint64(0)
	for _, g := range a.Groups {
		last = max(last, g.GetPosition()+1)
	}
	if last > a.CursorAfter {
		a.flag(Break{Group: a.name(last - 1)}, "CURSOR_BEHIND", "the ledger knows position %d, the scheduler's cursor stands at %d: prompts would be issued twice", last-1, a.CursorAfter)
	}
	config := a.Run.GetPlan().GetConfig()
	ahead := uint64(config.GetStaleness().GetMaxSteps()) + 1
	if a.positional() && a.Ledger.GetState().GetLeased() > 0 {
		ahead++ // the next step's prompts go out while the learner has this one's
	}
	limit := a.edge(min(a.Ledger.GetState().GetStep()+ahead, config.GetTrain().GetSteps()))
	if a.draws() {
		limit = a.reach()
	}
	if a.CursorBefore > limit {
		a.flag(Break{Group: a.name(limit)}, "CURSOR_BEYOND", "the cursor stands at position %d; at step %d it may be at %d at most: prompts were skipped, or issued too early",
			a.CursorBefore, a.Ledger.GetState().GetStep(), limit)
	}
}

// checkRun compares the run's record with the ledger.
func (a *auditor) checkRun() {
	step, total := a.Ledger.GetState().GetStep(), a.Run.GetPlan().GetConfig().GetTrain().GetSteps()
	if a.succeeded() && step != total {
		a.flag(Break{Step: step}, "RUN_INCOMPLETE", "the run is done after %d steps, the ledger has %d", total, step)
	}
	if a.Run.GetStep() > step {
		a.flag(Break{Step: step}, "RUN_AHEAD", "the run's record says step %d, the ledger has %d: rows of it are lost", a.Run.GetStep(), step)
	}
	if digest := a.Run.GetWeightsDigest(); digest != "" && a.Run.GetStep() == step && digest != a.report.Digest && a.succeeded() {
		a.flag(Break{Step: step}, "RUN_DIGEST", "the run's record says that it ended with %s, its last step made %s", digest, a.report.Digest)
	}
	if config := a.Run.GetPlan().GetConfig(); config.GetTrain().GetGroupsPerStep() != a.config.GetGroupsPerStep() || algorithm.GroupSize(config) != a.config.GetGroupSize() ||
		!slices.Contains(trainRows(a.Run), a.config.GetRows()) {
		a.flag(Break{}, "LEDGER_CONFIG", "the ledger was made for another plan: %d groups a step, %d samples a group, %d rows",
			a.config.GetGroupsPerStep(), a.config.GetGroupSize(), a.config.GetRows())
	}
}
