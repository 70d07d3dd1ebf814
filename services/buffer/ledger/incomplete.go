package ledger

import (
	"cmp"
	"context"
	"slices"
)

// block is the number of positions whose groups are read at a time.
const block = 1024

// Incomplete returns groups by position, at most limit, that lack samples and were neither
// dissolved nor excluded: open groups, and those of which the ledger has nothing.
//
// Almost always all of these are near the end. So the range that has all of the missing ones is
// found from the end, with the counts of the ledger: the costs do not grow with the run.
func Incomplete(ctx context.Context, r Reader, from, end uint64, limit int) ([]*Group, error) {
	groups, err := r.ListGroups(ctx, GroupQuery{From: from, To: end, States: []State{Open}, Limit: limit})
	if err != nil {
		return nil, err
	}
	missing := &gaps{Reader: r, limit: limit}
	if err := missing.find(ctx, from, end); err != nil {
		return nil, err
	}
	for _, p := range missing.positions {
		groups = append(groups, &Group{Position: p})
	}
	slices.SortFunc(groups, func(a, b *Group) int { return cmp.Compare(a.Position, b.Position) })
	return groups[:min(len(groups), limit)], nil
}

// gaps finds positions without a group.
type gaps struct {
	Reader
	limit     int
	positions []uint64
}

// find looks for the first positions of a range.
func (g *gaps) find(ctx context.Context, from, end uint64) error {
	if from >= end {
		return nil
	}
	known, err := g.known(ctx, from, end)
	if err != nil {
		return err
	}
	type part struct{ from, end, missing uint64 }
	var parts []part
	rest, begin := end-from-known, end
	for size := uint64(block); rest > 0; size *= 2 {
		p := part{begin - min(size, begin-from), begin, rest}
		if p.from > from { // otherwise it has all the rest
			n, err := g.Count(ctx, p.from, p.end)
			if err != nil {
				return err
			}
			p.missing = min(rest, p.end-p.from-n)
		}
		rest -= p.missing
		begin = p.from
		parts = append(parts, p)
	}
	for _, p := range slices.Backward(parts) {
		if err := g.collect(ctx, p.from, p.end, p.missing); err != nil {
			return err
		}
	}
	return nil
}

// known is the number of groups in a range that ends after the last group.
func (g *gaps) known(ctx context.Context, from, end uint64) (n uint64, err error) {
	l := g.Ledger()
	if from > l.Config.GetFirstPosition() {
		return g.Count(ctx, from, end)
	}
	for _, of := range l.Groups {
		n += of
	}
	return n, nil
}

// collect adds the positions of a range in order, of which a number is missing. It divides the
// range until a half lacks none, or is small.
func (g *gaps) collect(ctx context.Context, from, end, missing uint64) error {
	if missing == 0 || len(g.positions) >= g.limit {
		return nil
	}
	if end-from > block {
		middle := from + (end-from)/2
		n, err := g.Count(ctx, from, middle)
		if err != nil {
			return err
		}
		left := min(missing, middle-from-n)
		if err := g.collect(ctx, from, middle, left); err != nil {
			return err
		}
		return g.collect(ctx, middle, end, missing-left)
	}
	there, err := g.ListGroups(ctx, GroupQuery{From: from, To: end})
	if err != nil {
		return err
	}
	next := from
	for _, group := range there {
		for ; next < group.Position; next++ {
			g.positions = append(g.positions, next)
		}
		next = group.Position + 1
	}
	for ; next < end; next++ {
		g.positions = append(g.positions, next)
	}
	return nil
}
