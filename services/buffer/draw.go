package buffer

import (
	"context"
	"fmt"
	"math"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a step trains on groups_per_step groups whose rewards differ. A complete group
// whose rewards are all equal is excluded as it arrives, and the step goes on to the next groups in its place:
//
//	by position    the window of a step begins where the one before it ends, and holds groups_per_step groups that are not excluded.
//	               Which groups those are follows from positions and rewards alone. Nobody issues beyond it (see the scheduler's
//	               Window), so nothing is left over.
//	by completion  the first groups_per_step groups that arrived and are not excluded. Later ones stay for the next step, in the
//	               ledger, so a resumed run finds them.
//
// A step that has gone through most() groups draws no more: it takes what it has, or is refused (ErrExhausted).

// draws reports whether groups of equal rewards are left out and others drawn in their place.
func (l *Ledger) draws() bool { return l.Config.GetDrawBatches() > 0 }

// most is how many groups a step may go through.
func (l *Ledger) most() uint64 {
	return uint64(l.Config.GetDrawBatches()) * uint64(l.Config.GetGroupsPerStep())
}

// next is where the step after the last leased one begins. Each position before it is in a step, or was skipped by one.
func (l *Ledger) next() uint64 {
	return l.Config.GetFirstPosition() + l.Groups[Consumed] + l.Groups[Leased] + l.Skipped
}

// end is where the step after the given one begins, which was just leased.
func (l *Ledger) end(step uint64) uint64 {
	if l.draws() {
		return l.next()
	}
	_, to := l.window(step)
	return to
}

// lookAhead finds the groups of a step that goes past excluded ones.
func lookAhead(ctx context.Context, r Reader, step uint64) (*draw, error) {
	l := r.Ledger()
	d := &draw{missing: map[State]int{}}
	want := int(l.Config.GetGroupsPerStep())
	if l.Config.GetOrder() == bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION {
		groups, err := r.Arrived(ctx, int(l.most()))
		for _, g := range groups {
			if d.sort(l, g, step); len(d.take) == want {
				break
			}
		}
		d.drawn = len(d.take)+len(d.skip) == int(l.most())
		return d, err
	}
	from, to := l.window(step)
	groups, err := r.ListGroups(ctx, GroupQuery{From: from, To: to})
	p := from
	for ; p < to && int(p-from)-len(d.skip) < want; p++ {
		if len(groups) == 0 || groups[0].Position != p {
			d.missing[0]++
			continue
		}
		d.sort(l, groups[0], step)
		groups = groups[1:]
	}
	d.drawn = p == to && len(d.take)+len(d.skip) == int(to-from)
	return d, err
}

// enough refuses a step that has drawn all it may and has too few groups of it. ErrExhausted.
func (d *draw) enough(l *Ledger, step uint64) error {
	want := int(l.Config.GetGroupsPerStep())
	if !d.drawn || len(d.take) == want || l.Config.GetPartial() && len(d.take) > 0 {
		return nil
	}
	equal := 0
	for _, g := range d.skip {
		if g.Reason == ReasonZeroAdvantage {
			equal++
		}
	}
	return ErrExhausted.With("step", fmt.Sprint(step)).With("drawn", fmt.Sprint(l.most())).With("zero_advantage", fmt.Sprint(equal)).
		WithMessage("step %d needs %d groups whose rewards differ and may draw %d (sampling.refill_rounds = %d): in %d of them all rewards were equal, "+
			"%d were left out for other reasons, %d remain", step, want, l.most(), l.Config.GetDrawBatches(), equal, len(d.skip)-equal, len(d.take))
}

// inPlace tells in what a lease waits for of groups that others are drawn in place of.
func (d *draw) inPlace(l *Ledger) string {
	if !l.draws() || len(d.skip) == 0 {
		return ""
	}
	return fmt.Sprintf(", %d left out so far", len(d.skip))
}

// without counts those of the groups that a step goes without whose rewards were all equal, and their mean reward.
func without(ctx context.Context, r Reader, skip []*Group) (n uint32, mean float64, err error) {
	var positions []uint64
	for _, g := range skip {
		if g.Reason == ReasonZeroAdvantage {
			positions = append(positions, g.Position)
		}
	}
	spreads, err := rewardsOf(ctx, r, positions)
	if err != nil || len(positions) == 0 {
		return 0, 0, err
	}
	for _, p := range positions { // in their order: the sum of floats depends on it
		mean += spreads[p].low
	}
	return uint32(len(positions)), mean / float64(len(positions)), nil
}

// rewardsOf reads the rewards of groups, where a run draws others in place of those with equal ones.
func rewardsOf(ctx context.Context, r Reader, positions []uint64) (map[uint64]spread, error) {
	if !r.Ledger().draws() || len(positions) == 0 {
		return nil, nil
	}
	samples, err := r.Samples(ctx, distinct(append([]uint64(nil), positions...)))
	out := make(map[uint64]spread, len(positions))
	for i := range samples {
		out[samples[i].Position] = out[samples[i].Position].with(samples[i].Reward)
	}
	return out, err
}

// spread is the range of some rewards. The zero spread is of none.
type spread struct {
	low, high float64
	some      bool
}

func (s spread) with(reward float64) spread {
	if !s.some {
		return spread{reward, reward, true}
	}
	return spread{math.Min(s.low, reward), math.Max(s.high, reward), true}
}

// equal reports whether all are the same number. One that is no number equals none.
func (s spread) equal() bool { return s.some && s.low == s.high }
