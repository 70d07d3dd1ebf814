package ledger

import (
	"context"
	"math"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// Unconsumed returns the first position whose group no committed step has consumed or passed.
func Unconsumed(ctx context.Context, r Reader) (uint64, error) {
	l := r.Ledger()
	end, err := r.End(ctx)
	if err != nil {
		return 0, err
	}
	first := max(end, l.Config.GetFirstPosition())
	if s, err := r.Step(ctx, l.Step); err != nil {
		return 0, err
	} else if s != nil && l.Config.GetOrder() == bufferv1.LeaseOrder_LEASE_ORDER_POSITION {
		return s.End, nil
	}
	incomplete, err := Incomplete(ctx, r, l.Config.GetFirstPosition(), end, 1)
	if err != nil {
		return 0, err
	}
	waiting, err := r.Arrived(ctx, math.MaxInt32)
	if err != nil {
		return 0, err
	}
	leased, err := r.Taken(ctx, l.Step+1) // also the excluded groups that it passes
	if err != nil {
		return 0, err
	}
	dissolved, err := r.ListGroups(ctx, GroupQuery{States: []State{Dissolved}, Limit: 1})
	if err != nil {
		return 0, err
	}
	for _, groups := range [][]*Group{incomplete, waiting, leased, dissolved} {
		for _, g := range groups {
			first = min(first, g.Position)
		}
	}
	return first, nil
}

// Begun reports whether a ledger has groups or weights. Without, it can begin with those of a
// snapshot.
func Begun(ctx context.Context, r Reader) (bool, error) {
	end, err := r.End(ctx)
	if err != nil || end > 0 {
		return end > 0, err
	}
	weights, err := r.ListWeights(ctx, 0, 1)
	return len(weights) > 0, err
}

// Seed begins a new ledger with what Unconsumed and the groups after it were in another one. Groups
// of a leased batch are complete again; consumed groups count for the step before the first one of
// this ledger. The segments have the payloads of the samples.
func Seed(ctx context.Context, tx Tx, groups []*Group, samples []Sample, weights []Weights, segments []Segment) error {
	l := tx.Ledger()
	for _, g := range groups {
		switch {
		case g.State == Leased:
			g.State, g.Step = Ready, 0
		case g.State == Consumed, g.State == Excluded && g.Step > 0 && g.Step <= l.Config.GetFirstStep():
			g.Step = l.Config.GetFirstStep()
		default:
			g.Step = 0
		}
		if g.State == Excluded && g.Step > 0 {
			l.Skipped++
		}
		l.Groups[g.State]++
		l.Arrivals = max(l.Arrivals, g.Arrival)
	}
	for _, w := range weights {
		if _, err := record(ctx, tx, w); err != nil {
			return err
		}
	}
	for _, s := range segments {
		if err := tx.PutSegment(ctx, s); err != nil {
			return err
		}
	}
	l.Samples += uint64(len(samples))
	if err := tx.PutGroups(ctx, groups); err != nil {
		return err
	}
	return tx.AddSamples(ctx, samples)
}
