package ledger

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// table is a ledger of groups by position, and counts the rows that are read.
type table struct {
	Reader
	ledger *Ledger
	groups []*Group
	read   int
}

func (t *table) Ledger() *Ledger { return t.ledger }

func (t *table) Count(_ context.Context, from, end uint64) (n uint64, _ error) {
	for _, g := range t.groups {
		if g.Position >= from && g.Position < end {
			n++
		}
	}
	return n, nil
}

func (t *table) ListGroups(_ context.Context, q GroupQuery) (out []*Group, _ error) {
	for _, g := range t.groups {
		if g.Position >= q.From && g.Position < q.To && (len(q.States) == 0 || g.State == q.States[0]) && (q.Limit == 0 || len(out) < q.Limit) {
			out = append(out, g)
		}
	}
	t.read += len(out)
	return out, nil
}

// Groups that lack samples are found wherever they are, and few rows are read for it.
func TestIncomplete(t *testing.T) {
	t.Parallel()
	const first, end = 7, 8_000
	rng := rand.New(rand.NewPCG(1, 2))
	for name, c := range map[string]struct {
		state func(p uint64) State // 0: no group
		read  int
	}{
		"complete":      {func(uint64) State { return Consumed }, 0},
		"all missing":   {func(uint64) State { return 0 }, 0},
		"all open":      {func(uint64) State { return Open }, end},
		"end missing":   {func(p uint64) State { return Consumed * min(1, State(max(end-20, p)-p)) }, 2 * block},
		"first missing": {func(p uint64) State { return Consumed * min(1, State(p-first)) }, 2 * block},
		"two and open": {func(p uint64) State {
			switch p {
			case end / 2, end/2 + 1:
				return 0
			case 99, end - 1:
				return Open
			}
			return Excluded
		}, 2*block + 2},
		"at random": {func(uint64) State { return []State{0, Open, Ready, Consumed, Dissolved, Excluded}[rng.IntN(6)] }, end},
	} {
		for _, from := range []uint64{first, first + 1, end / 2, end - 5, end, end + 5} {
			r := &table{ledger: &Ledger{Config: &bufferv1.LedgerConfig{FirstPosition: first}}}
			var want []uint64
			for p := uint64(first); p < end; p++ {
				s := c.state(p)
				if s != 0 {
					r.groups = append(r.groups, &Group{Position: p, State: s, Attempt: 3})
					r.ledger.Groups[s]++
				}
				if p >= from && (s == 0 || s == Open) {
					want = append(want, p)
				}
			}
			for _, limit := range []int{1, 100, end} {
				r.read = 0
				got, err := Incomplete(t.Context(), r, from, end, limit)
				if err != nil {
					t.Fatal(err)
				}
				var positions []uint64
				for _, g := range got {
					positions = append(positions, g.Position)
					if open := g.State == Open; open != (g.Attempt == 3) {
						t.Errorf("%s: group %+v", name, g)
					}
				}
				if !slices.Equal(positions, want[:min(limit, len(want))]) {
					t.Errorf("%s from %d, limit %d: %d positions %v, want %d", name, from, limit, len(positions), positions[:min(9, len(positions))], len(want))
				}
				if r.read > c.read {
					t.Errorf("%s from %d, limit %d: %d rows were read", name, from, limit, r.read)
				}
			}
		}
	}
}
