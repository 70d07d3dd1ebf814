package issue

import (
	"math/rand/v2"
	"testing"
	"testing/quick"
)

// model is a run in which groups become complete in any order, fail, and steps take what the buffer
// would give them.
type model struct {
	w        Window
	rng      *rand.Rand
	issued   uint64
	open     []modelGroup
	ready    []modelGroup // in the order of completion
	consumed uint64
	excluded uint64
	step     uint64
	leased   []modelGroup // of the batch that is with the learner
	most     uint64       // groups that may be issued and not consumed
}

type modelGroup struct{ position, issuedAt, min uint64 }

func (m *model) outstanding() uint64 {
	return m.issued - m.w.First - m.consumed - m.excluded - uint64(len(m.leased))
}

// turn takes one random action. It returns a violated rule, or "".
func (m *model) turn() string {
	switch m.rng.IntN(4) {
	case 0, 1:
		upto := m.w.Within(m.w.Upto(m.issued, m.step, len(m.leased) > 0), m.issued, m.consumed+m.excluded, m.most)
		for ; m.issued < upto; m.issued++ {
			m.open = append(m.open, modelGroup{m.issued, m.step, m.w.MinVersion(m.issued, m.step)})
		}
		if bound := (m.w.Staleness + 1) * m.w.GroupsPerStep; m.outstanding() > bound {
			return "more is outstanding than the bound allows"
		}
		if m.outstanding()+uint64(len(m.leased)) > max(m.most, m.w.GroupsPerStep) {
			return "more is outstanding than the bytes allow"
		}
	case 2: // a group comes to an end
		if len(m.open) == 0 {
			return ""
		}
		i := m.rng.IntN(len(m.open))
		g := m.open[i]
		if !m.w.Data && g.min > m.step {
			return "" // its weights do not exist yet
		}
		m.open = append(m.open[:i], m.open[i+1:]...)
		if m.rng.IntN(20) == 0 {
			m.excluded++
			return ""
		}
		m.ready = append(m.ready, g)
	case 3:
		if len(m.leased) > 0 {
			m.commit()
			return ""
		}
		return m.lease()
	}
	return ""
}

// commit makes the step of the leased batch.
func (m *model) commit() {
	m.step++
	m.consumed += uint64(len(m.leased))
	m.leased = nil
}

// lease consumes the groups of a step if all groups of its window are complete or excluded.
func (m *model) lease() string {
	from := m.w.First + (m.step-m.w.FirstStep)*m.w.GroupsPerStep
	to := from + m.w.GroupsPerStep
	for _, g := range m.open {
		if g.position < to {
			return ""
		}
	}
	if m.step == m.w.Steps || m.issued < to {
		return ""
	}
	var rest []modelGroup
	for _, g := range m.ready {
		if g.position >= to {
			rest = append(rest, g)
			continue
		}
		m.leased = append(m.leased, g)
		if m.w.Sync && !m.w.Data && g.min != m.step {
			return "a group of a sync run was sampled by other weights than those of its step"
		}
		if !m.w.Data && m.step > m.w.Staleness+max(g.issuedAt, g.min) {
			return "a group that was sampled when it was issued is older than the staleness allows"
		}
		if !m.w.Data && g.min > g.issuedAt && !m.w.Sync {
			return "a group waits for weights that did not exist when it was issued"
		}
	}
	m.ready = rest
	if len(m.leased) == 0 {
		m.step++ // every group of the window was left out
	}
	return ""
}

// TestStalenessBound runs random shapes of runs to their end and looks after each turn.
func TestStalenessBound(t *testing.T) {
	t.Parallel()
	property := func(seed uint64, groups, staleness, steps, firstStep uint8, kind uint8) bool {
		w := Window{
			GroupsPerStep: uint64(groups%7) + 1, Staleness: uint64(staleness % 5), FirstStep: uint64(firstStep % 4),
			Data: kind%3 == 0, Sync: kind%3 != 2, Completion: kind%3 == 2,
		}
		if w.Sync && !w.Data {
			w.Staleness = 0
		}
		w.Steps = w.FirstStep + uint64(steps%9)
		w.First = w.FirstStep * w.GroupsPerStep
		m := &model{w: w, rng: rand.New(rand.NewPCG(seed, 0)), issued: w.First, step: w.FirstStep, most: seed % 64}
		for turns := 0; m.step < w.Steps; turns++ {
			if wrong := m.turn(); wrong != "" {
				t.Logf("%+v, step %d: %s", w, m.step, wrong)
				return false
			}
			if turns > 100_000 {
				t.Logf("%+v makes no progress at step %d: %d issued, %d open, %d ready", w, m.step, m.issued, len(m.open), len(m.ready))
				return false
			}
		}
		return m.issued == w.First+(w.Steps-w.FirstStep)*w.GroupsPerStep
	}
	if err := quick.Check(property, &quick.Config{MaxCount: 3000}); err != nil {
		t.Fatal(err)
	}
}

func TestMinVersion(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		w                Window
		position, newest uint64
		want             uint64
	}{
		"data":                        {Window{Data: true, GroupsPerStep: 4}, 40, 9, 0},
		"sync, first window":          {Window{Sync: true, GroupsPerStep: 4}, 3, 0, 0},
		"sync, ahead":                 {Window{Sync: true, GroupsPerStep: 4}, 9, 0, 2},
		"sync, restored":              {Window{Sync: true, GroupsPerStep: 4, First: 20, FirstStep: 5}, 24, 5, 6},
		"async, young":                {Window{GroupsPerStep: 4, Staleness: 2}, 40, 1, 0},
		"async":                       {Window{GroupsPerStep: 4, Staleness: 2}, 40, 9, 7},
		"async, restored and young":   {Window{GroupsPerStep: 4, Staleness: 2, First: 20, FirstStep: 5}, 40, 6, 5},
		"async, restored and grown":   {Window{GroupsPerStep: 4, Staleness: 2, First: 20, FirstStep: 5}, 40, 9, 7},
		"async, no staleness allowed": {Window{GroupsPerStep: 4}, 40, 9, 9},
	} {
		if got := c.w.MinVersion(c.position, c.newest); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}
