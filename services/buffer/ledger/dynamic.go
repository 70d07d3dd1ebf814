package ledger

import (
	"context"
	"fmt"
	"math"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a step trains on groups_per_step groups
// whose rewards differ. A complete group whose rewards are all equal is excluded when it arrives,
// and the step continues with the next groups:
//
//	by position    the window of a step begins where the previous one ends, and contains groups_per_step groups that are not
//	               excluded. Which groups those are follows from positions and rewards alone. The scheduler issues nothing beyond
//	               the window, so no group is left over.
//	by completion  the first groups_per_step groups that arrived and are not excluded. Later ones stay in the ledger for the next
//	               step, so a resumed run finds them.
//
// A step that has gone through drawLimit groups draws no more: it takes the groups it has, or is
// refused (ErrExhausted).

// dynamic reports whether groups with equal rewards are excluded and replaced by others.
func (l *Ledger) dynamic() bool { return l.Config.GetDrawBatches() > 0 }

// drawLimit is the largest number of groups that a step may go through.
func (l *Ledger) drawLimit() uint64 {
	return uint64(l.Config.GetDrawBatches()) * uint64(l.Config.GetGroupsPerStep())
}

// next is where the step after the last leased one begins. Each position before it is in a step, or
// was passed by one.
func (l *Ledger) next() uint64 {
	return l.Config.GetFirstPosition() + l.Groups[Consumed] + l.Groups[Leased] + l.Skipped
}

// end returns the first position after the last leased step.
func (l *Ledger) end(step uint64) uint64 {
	if l.dynamic() {
		return l.next()
	}
	_, to := l.window(step)
	return to
}

// selectDynamic finds the groups of a step that passes excluded ones.
func selectDynamic(ctx context.Context, r Reader, step uint64) (*selection, error) {
	l := r.Ledger()
	d := &selection{missing: map[State]int{}}
	want := int(l.Config.GetGroupsPerStep())
	if l.Config.GetOrder() == bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION {
		groups, err := r.Arrived(ctx, int(l.drawLimit()))
		for _, g := range groups {
			if d.add(l, g, step); len(d.take) == want {
				break
			}
		}
		d.exhausted = len(d.take)+len(d.skip) == int(l.drawLimit())
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
		d.add(l, groups[0], step)
		groups = groups[1:]
	}
	d.exhausted = p == to && len(d.take)+len(d.skip) == int(to-from)
	return d, err
}

// check refuses a step that has drawn all the groups it may and has too few. ErrExhausted.
func (d *selection) check(l *Ledger, step uint64) error {
	want := int(l.Config.GetGroupsPerStep())
	if !d.exhausted || len(d.take) == want || l.Config.GetPartial() && len(d.take) > 0 {
		return nil
	}
	equal := d.equal()
	return ErrExhausted.With("step", fmt.Sprint(step)).With("drawn", fmt.Sprint(l.drawLimit())).With("zero_advantage", fmt.Sprint(equal)).
		WithMessage("step %d needs %d groups whose rewards differ and may draw %d (sampling.refill_rounds = %d): in %d of them all rewards were equal, "+
			"%d were excluded for other reasons, %d remain", step, want, l.drawLimit(), l.Config.GetDrawBatches(), equal, len(d.skip)-equal, len(d.take))
}

// equal counts the groups that were excluded because all of their rewards were equal.
func (d *selection) equal() (n int) {
	for _, g := range d.skip {
		if g.Reason == ReasonZeroAdvantage {
			n++
		}
	}
	return n
}

// excludedSoFar adds the number of replaced groups to what a lease waits for.
func (d *selection) excludedSoFar(l *Ledger) string {
	if !l.dynamic() || len(d.skip) == 0 {
		return ""
	}
	return fmt.Sprintf(", %d excluded so far", len(d.skip))
}

// zeroAdvantage counts the excluded groups whose rewards were all equal, and returns their mean
// reward.
func zeroAdvantage(ctx context.Context, r Reader, skip []*Group) (n uint32, mean float64, err error) {
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
	for _, p := range positions { // in this order, because the sum of floats depends on it
		mean += spreads[p].low
	}
	return uint32(len(positions)), mean / float64(len(positions)), nil
}

// rewardsOf reads the rewards of groups, if the run uses dynamic sampling.
func rewardsOf(ctx context.Context, r Reader, positions []uint64) (map[uint64]spread, error) {
	if !r.Ledger().dynamic() || len(positions) == 0 {
		return nil, nil
	}
	samples, err := r.Samples(ctx, distinctCopy(positions))
	out := make(map[uint64]spread, len(positions))
	for i := range samples {
		out[samples[i].Position] = out[samples[i].Position].add(&samples[i])
	}
	return out, err
}

// spread is the range of some rewards. The zero spread is empty.
type spread struct {
	low, high float64
	some      bool
}

// add includes the reward of a sample. One that is left out of its group has none.
func (s spread) add(sample *Sample) spread {
	switch reward := sample.Reward; {
	case !Trained(sample.Outcome):
		return s
	case !s.some:
		return spread{reward, reward, true}
	default:
		return spread{math.Min(s.low, reward), math.Max(s.high, reward), true}
	}
}

// equal reports whether all rewards are the same number. NaN equals nothing.
func (s spread) equal() bool { return s.some && s.low == s.high }
