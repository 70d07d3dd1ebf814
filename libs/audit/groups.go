package audit

import (
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/algorithm"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// groupCheck checks group records, and the ledger, cursor and run against them.
type groupCheck struct {
	*index
	*findings
}

// prompt checks that a prompt has one record, in a state that fits its step.
func (c groupCheck) prompt(p *Prompt) {
	for i, g := range p.Groups {
		if i > 0 {
			c.add(c.ofGroup(g), "GROUP_TWICE", "the prompt has two records: of step %d and of step %d", p.group().GetStep(), g.GetStep())
			continue
		}
		c.group(g)
	}
}

func (c groupCheck) group(g *bufferv1.GroupRecord) {
	at, p := c.ofGroup(g), g.GetPosition()
	if k := g.GetKey(); uint64(k.GetEpoch())*c.config.GetRows()+k.GetIndex() != p || p < c.config.GetFirstPosition() {
		c.add(at, "GROUP_MISPLACED", "group %d/%d is recorded at position %d", k.GetEpoch(), k.GetIndex(), p)
	}
	window := c.window(p)
	step, recorded := c.find(g.GetStep())
	switch g.GetState() {
	case consumed:
		if !step.committed && !c.carried(g) {
			c.add(at, "CONSUMED_BY_NO_STEP", "it is consumed by step %d, which is not committed", g.GetStep())
		}
	case leased:
		if !recorded || step.committed {
			c.add(at, "LEASED_BY_NO_STEP", "it is leased for step %d, which is not in progress", g.GetStep())
		}
	case excluded:
		c.report.Excluded[g.GetReason()]++
		if g.GetReason() == "" {
			c.add(at, "EXCLUDED_WITHOUT_REASON", "it is excluded without a reason")
		}
	case open, ready, dissolved:
		if c.positional() && window <= c.Ledger.GetState().GetStep() {
			c.add(at, "NOT_CONSUMED", "its step %d is committed, but the group is %s", window, stateName(g))
		}
		if g.GetState() == dissolved && g.GetReason() == "" {
			c.add(at, "DISSOLVED_WITHOUT_REASON", "its attempt was given up without a reason")
		}
	default:
		c.add(at, "GROUP_STATE_UNKNOWN", "its state is %d", g.GetState())
	}
	if c.positional() && g.GetStep() > 0 && g.GetStep() != window {
		c.add(at, "WRONG_STEP", "step %d took it, but its position belongs to step %d", g.GetStep(), window)
	}
}

func stateName(g *bufferv1.GroupRecord) string {
	return strings.TrimPrefix(g.GetState().String(), "GROUP_STATE_") // unknown ones are numbers
}

// counts compares the ledger's counters with the number of its records in each state.
func (c groupCheck) counts(records map[bufferv1.GroupState]uint64) {
	s := c.Ledger.GetState()
	for _, counter := range []struct {
		state bufferv1.GroupState
		value uint64
	}{
		{open, s.GetOpen()}, {ready, s.GetReady()}, {leased, s.GetLeased()}, {consumed, s.GetConsumed()}, {excluded, s.GetExcluded()},
		{dissolved, uint64(len(s.GetDissolved()))},
	} {
		if records[counter.state] != counter.value {
			c.add(Break{}, "LEDGER_COUNTS", "the ledger counts %d %s groups; it has %d records of them",
				counter.value, counter.state.String()[len("GROUP_STATE_"):], records[counter.state])
		}
	}
}

// cursor compares the position of the scheduler's cursor with the ledger, whose groups end at last.
func (c groupCheck) cursor(last uint64) {
	if last > c.CursorAfter {
		c.add(Break{Group: c.name(last - 1)}, "CURSOR_BEHIND", "the ledger has position %d, but the scheduler's cursor is at %d: prompts would be issued twice", last-1, c.CursorAfter)
	}
	config := c.Run.GetPlan().GetConfig()
	ahead := uint64(config.GetStaleness().GetMaxSteps()) + 1
	if c.positional() && c.Ledger.GetState().GetLeased() > 0 {
		ahead++ // the next step's prompts are issued while the learner has this one's
	}
	limit := c.end(min(c.Ledger.GetState().GetStep()+ahead, config.GetTrain().GetSteps()))
	if c.dynamic() {
		limit = c.dynamicLimit()
	}
	if c.CursorBefore > limit {
		c.add(Break{Group: c.name(limit)}, "CURSOR_BEYOND", "the cursor is at position %d; after step %d it may be at %d at most: prompts were skipped, or issued too early",
			c.CursorBefore, c.Ledger.GetState().GetStep(), limit)
	}
}

// dynamicLimit is the last position that the cursor may have with dynamic sampling.
func (c groupCheck) dynamicLimit() uint64 {
	s, want, total := c.Ledger.GetState(), uint64(c.config.GetGroupsPerStep()), c.Run.GetPlan().GetConfig().GetTrain().GetSteps()
	step := max(s.GetStep(), c.config.GetFirstStep())
	if !c.positional() {
		ahead := min(uint64(c.config.GetMaxStaleness())+1, total-min(step, total))
		return c.config.GetFirstPosition() + s.GetConsumed() + s.GetExcluded() + ahead*want
	}
	begin := c.config.GetFirstPosition() + s.GetConsumed() + s.GetLeased() + s.GetSkipped()
	if s.GetLeased() > 0 {
		step++
	}
	if step >= total {
		return begin
	}
	return begin + min(want+s.GetExcluded()-s.GetSkipped(), want*uint64(c.config.GetDrawBatches()))
}

// run compares the scheduler's record of the run with the ledger.
func (c groupCheck) run() {
	step, config := c.Ledger.GetState().GetStep(), c.Run.GetPlan().GetConfig()
	total := config.GetTrain().GetSteps()
	if c.stopped() {
		total = c.Run.GetStep()
	}
	if c.succeeded() && step != total {
		c.add(Break{Step: step}, "RUN_INCOMPLETE", "the run succeeded after %d steps; the ledger has %d", total, step)
	}
	if c.Run.GetStep() > step {
		c.add(Break{Step: step}, "RUN_AHEAD", "the run is recorded at step %d; the ledger has %d: its rows are lost", c.Run.GetStep(), step)
	}
	if digest := c.Run.GetWeightsDigest(); digest != "" && c.Run.GetStep() == step && digest != c.report.Digest && c.succeeded() {
		c.add(Break{Step: step}, "RUN_DIGEST", "the run is recorded with the final weights %s; its last step made %s", digest, c.report.Digest)
	}
	if config.GetTrain().GetGroupsPerStep() != c.config.GetGroupsPerStep() || algorithm.GroupSize(config) != c.config.GetGroupSize() ||
		!slices.Contains(trainRows(c.Run), c.config.GetRows()) {
		c.add(Break{}, "LEDGER_CONFIG", "the ledger was opened for another plan: %d groups per step, %d samples per group, %d rows",
			c.config.GetGroupsPerStep(), c.config.GetGroupSize(), c.config.GetRows())
	}
}

// trainRows returns the number of rows of each training file of the plan.
func trainRows(run *runv1.Run) (out []uint64) {
	for _, in := range run.GetPlan().GetInputs() {
		if in.GetRole() == planv1.InputRole_INPUT_ROLE_TRAIN_DATA {
			out = append(out, in.GetRows())
		}
	}
	return out
}
