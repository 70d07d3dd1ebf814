package buffer

import (
	"cmp"
	"context"
	"slices"
	"sync"
)

// memory holds the samples of groups that no step has taken, as the ledger has them, so that a lease need not read what an ingest has
// just written, row by row. The ledger's revision says whether it may be asked: it counts only in a transaction that follows the last
// one which it has seen. Whatever another process writes, or a commit without an answer may have written, makes it forget.
type memory struct {
	mu       sync.Mutex
	revision uint64              // of the ledger that it agrees with; 0: of none
	held     map[uint64][]Sample // by position: all rows of a group, by sample and part. Slices are not changed
	samples  int
	later    map[uint64]change // by revision: transactions end in order, their callers need not
}

// change is what one transaction did to samples.
type change struct {
	whole map[uint64][]Sample // all rows of a group from now on
	gone  map[uint64]bool     // groups whose rows are gone, or of no more use here
	all   bool                // who knows whose
}

const (
	// remembered is how many samples of a run are held, some 4 MB. What came before them is leased before them.
	remembered = 32 << 10
	// overtaken is how many transactions may end before one that was first, until something else is the matter.
	overtaken = 8
)

// forget agrees with no ledger any more.
func (m *memory) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.drop()
}

func (m *memory) drop() { m.revision, m.held, m.later, m.samples = 0, nil, nil, 0 }

// learn takes what the transaction of a revision did, once it is committed.
func (m *memory) learn(revision uint64, c change) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.revision == 0:
		m.take(revision, c)
	case revision <= m.revision: // it overtook another, after something was forgotten
		m.drop()
	case revision > m.revision+1:
		if m.later == nil {
			m.later = map[uint64]change{}
		}
		if m.later[revision] = c; len(m.later) > overtaken { // another process wrote
			m.drop()
		}
	default:
		m.take(revision, c)
		for next, ok := m.later[m.revision+1]; ok; next, ok = m.later[m.revision+1] {
			delete(m.later, m.revision+1)
			m.take(m.revision+1, next)
		}
	}
}

func (m *memory) take(revision uint64, c change) {
	if m.revision = revision; c.all || m.held == nil {
		m.held, m.samples = map[uint64][]Sample{}, 0
	}
	for p := range c.gone {
		m.put(p, nil)
	}
	for p, rows := range c.whole {
		m.put(p, rows)
	}
}

func (m *memory) put(p uint64, rows []Sample) {
	m.samples -= len(m.held[p])
	delete(m.held, p)
	if len(rows) > 0 && m.samples+len(rows) <= remembered {
		m.held[p] = rows
		m.samples += len(rows)
	}
}

// recall is the rows of a group for the transaction of a revision; nil where they are not known.
func (m *memory) recall(revision, position uint64) []Sample {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.revision == 0 || m.revision+1 != revision {
		return nil
	}
	return m.held[position]
}

// mindful is a transaction that remembers what it does.
type mindful struct {
	Tx
	memory *memory
	change change
}

func newMindful(tx Tx, m *memory) *mindful {
	return &mindful{Tx: tx, memory: m, change: change{whole: map[uint64][]Sample{}, gone: map[uint64]bool{}}}
}

// PutGroups implements Tx. Nobody asks for the samples of groups that are leased or past that.
func (t *mindful) PutGroups(ctx context.Context, groups []*Group) error {
	for _, g := range groups {
		if g.State != Open && g.State != Ready {
			t.lose(g.Position)
		}
	}
	return t.Tx.PutGroups(ctx, groups)
}

// DropSamples implements Tx.
func (t *mindful) DropSamples(ctx context.Context, position uint64) error {
	t.lose(position)
	return t.Tx.DropSamples(ctx, position)
}

// Verify implements Tx.
func (t *mindful) Verify(ctx context.Context, version uint64) error {
	t.change.all = true
	clear(t.change.whole)
	return t.Tx.Verify(ctx, version)
}

func (t *mindful) lose(position uint64) {
	delete(t.change.whole, position)
	t.change.gone[position] = true
}

func (t *mindful) recall(position uint64) []Sample {
	switch rows := t.change.whole[position]; {
	case rows != nil:
		return rows
	case t.change.all, t.change.gone[position]:
		return nil
	}
	return t.memory.recall(t.Ledger().Revision, position)
}

// keep tells a transaction all rows that a group has now, where it remembers.
func keep(tx Tx, g *Group, before, fresh []Sample) {
	t, ok := tx.(*mindful)
	if !ok || g.State != Open && g.State != Ready {
		return
	}
	rows := append(slices.Clip(before), fresh...)
	slices.SortFunc(rows, func(a, b Sample) int { return cmp.Or(cmp.Compare(a.Sample, b.Sample), cmp.Compare(a.Part, b.Part)) })
	delete(t.change.gone, g.Position)
	t.change.whole[g.Position] = rows
}

// samplesOf is tx.Samples, which reads what is not remembered.
func samplesOf(ctx context.Context, tx Tx, positions []uint64) ([]Sample, error) {
	t, ok := tx.(*mindful)
	if !ok {
		return tx.Samples(ctx, positions)
	}
	var out []Sample
	var unknown []uint64
	for _, p := range positions {
		if rows := t.recall(p); rows != nil {
			out = append(out, rows...)
		} else {
			unknown = append(unknown, p)
		}
	}
	if len(unknown) == 0 {
		return out, nil
	}
	read, err := tx.Samples(ctx, unknown)
	out = append(out, read...)
	slices.SortStableFunc(out, func(a, b Sample) int { return cmp.Compare(a.Position, b.Position) })
	return out, err
}
