package issue

import (
	"math/rand/v2"
	"slices"
	"testing"
	"testing/quick"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// drawModel is a run with dynamic sampling: groups become complete in any order, some are excluded,
// and steps take what the buffer would give them.
type drawModel struct {
	w      Window
	rng    *rand.Rand
	ledger *bufferv1.LedgerState
	issued uint64
	min    map[uint64]uint64 // position -> oldest weights that may sample it, while it is in flight
	state  map[uint64]bufferv1.GroupState
	order  []uint64 // of completion and exclusion, that no step has taken
	end    uint64   // where the next step begins, by position
}

const (
	isReady    = bufferv1.GroupState_GROUP_STATE_READY
	isExcluded = bufferv1.GroupState_GROUP_STATE_EXCLUDED
)

func (m *drawModel) turn() string {
	switch m.rng.IntN(3) {
	case 0:
		upto := m.w.Refill(m.issued, m.ledger)
		for ; m.issued < upto; m.issued++ {
			m.min[m.issued] = m.w.MinVersion(m.issued, m.w.Made(m.ledger))
		}
		out := m.issued - m.w.First - m.ledger.GetConsumed() - m.ledger.GetLeased() - m.ledger.GetExcluded()
		if out > (m.w.Staleness+1)*m.w.GroupsPerStep {
			return "more is outstanding than the bound allows"
		}
	case 1:
		for p, least := range m.min { // a map's order is random
			if least > m.ledger.GetStep() {
				continue // its weights do not exist yet
			}
			delete(m.min, p)
			m.state[p] = isReady
			if m.rng.IntN(5) < 2 {
				m.state[p] = isExcluded
				m.ledger.Excluded++
			}
			if m.w.Sync && least != m.ledger.GetStep() {
				return "a group of a sync run is sampled by other weights than those of its step"
			}
			m.order = append(m.order, p)
			return ""
		}
	case 2:
		if m.ledger.GetLeased() > 0 {
			m.ledger.Step++
			m.ledger.Consumed, m.ledger.Leased = m.ledger.Consumed+m.ledger.Leased, 0
			return ""
		}
		return m.lease()
	}
	return ""
}

// lease takes a step as the buffer does: see services/buffer/ledger/dynamic.go.
func (m *drawModel) lease() string {
	if m.ledger.GetStep() == m.w.Steps {
		return ""
	}
	most := m.w.Draw * m.w.GroupsPerStep
	var from []uint64
	if from = m.order; !m.w.Completion {
		from = nil
		for p := m.end; p < m.end+most && m.state[p] != 0; p++ {
			from = append(from, p)
		}
	}
	take, skip := uint64(0), uint64(0)
	for _, p := range from {
		if take == m.w.GroupsPerStep || take+skip == most {
			break
		}
		if m.state[p] == isReady {
			take++
		} else {
			skip++
		}
	}
	if take < m.w.GroupsPerStep && take+skip < most {
		return ""
	}
	if take == 0 { // a real run fails here; the model continues
		m.ledger.Step++
	}
	taken := from[:take+skip]
	m.order = slices.DeleteFunc(slices.Clone(m.order), func(p uint64) bool { return slices.Contains(taken, p) })
	m.ledger.Leased, m.ledger.Skipped, m.end = take, m.ledger.Skipped+skip, m.end+take+skip
	if !m.w.Completion && m.end != m.issued {
		return "a step of a sync run does not use all its groups"
	}
	return ""
}

// TestRefill runs random shapes of runs to their end and looks after each turn.
func TestRefill(t *testing.T) {
	t.Parallel()
	property := func(seed uint64, groups, staleness, steps, draw uint8, sync bool) bool {
		w := Window{
			GroupsPerStep: uint64(groups%5) + 1, Staleness: uint64(staleness % 4), Steps: uint64(steps%9) + 3, First: 17, FirstStep: 3,
			Sync: sync, Completion: !sync, Draw: uint64(draw%4) + 1,
		}
		if sync {
			w.Staleness = 0
		}
		m := &drawModel{
			w: w, rng: rand.New(rand.NewPCG(seed, 0)), ledger: &bufferv1.LedgerState{Step: 3}, issued: w.First, end: w.First,
			min: map[uint64]uint64{}, state: map[uint64]bufferv1.GroupState{},
		}
		for turns := 0; m.ledger.GetStep() < w.Steps; turns++ {
			if wrong := m.turn(); wrong != "" {
				t.Logf("%+v at %v: %s", w, m.ledger, wrong)
				return false
			}
			if turns > 100_000 {
				t.Logf("%+v makes no progress at %v: %d issued, %d in flight", w, m.ledger, m.issued, len(m.min))
				return false
			}
		}
		return w.Refill(m.issued, m.ledger) == m.issued // the run is over
	}
	if err := quick.Check(property, &quick.Config{MaxCount: 2000}); err != nil {
		t.Fatal(err)
	}
}
