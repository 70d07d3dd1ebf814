package ledger

import (
	"context"
	"fmt"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// Missing returns the samples of each group that have not arrived.
func Missing(ctx context.Context, r Reader, keys []*bufferv1.GroupKey) ([]*bufferv1.MissingSamples, error) {
	l := r.Ledger()
	positions, err := l.positions(keys)
	if err != nil {
		return nil, err
	}
	groups, err := r.Groups(ctx, distinctCopy(positions))
	if err != nil {
		return nil, err
	}
	samples, err := r.Samples(ctx, distinctCopy(positions))
	if err != nil {
		return nil, err
	}
	have := map[uint64]map[uint32]bool{}
	for i := range samples {
		p := samples[i].Position
		if have[p] == nil {
			have[p] = map[uint32]bool{}
		}
		have[p][samples[i].Sample] = true
	}
	out := make([]*bufferv1.MissingSamples, len(keys))
	for i, key := range keys {
		out[i] = &bufferv1.MissingSamples{}
		g, there := groups[positions[i]], map[uint32]bool(nil)
		if g != nil {
			newer := key.GetAttempt() > g.Attempt && (g.State == Open || g.State == Dissolved)
			if current := key.GetAttempt() == g.Attempt && g.State == Open; !newer && !current {
				continue
			}
			if !newer {
				there = have[positions[i]]
			}
		}
		for n := range l.Config.GetGroupSize() {
			if !there[n] {
				out[i].Samples = append(out[i].Samples, n)
			}
		}
	}
	return out, nil
}

// Exclude excludes groups for a reason, all of them or none. ErrGroupState, ErrAttempt, ErrRange.
func Exclude(ctx context.Context, tx Tx, keys []*bufferv1.GroupKey, reason string) error {
	return changeGroups(ctx, tx, keys, func(g *Group, key *bufferv1.GroupKey) error {
		switch {
		case g.State == Excluded:
			return nil
		case key.GetAttempt() < g.Attempt:
			return tx.Ledger().outdated(g, key)
		}
		if err := tx.DropSamples(ctx, g.Position); err != nil {
			return err
		}
		g.Attempt = key.GetAttempt()
		return tx.Ledger().move(g, Excluded, reason)
	})
}

// Reissue opens the next attempt of groups, all of them or none. ErrGroupState, ErrAttempt,
// ErrRange.
func Reissue(ctx context.Context, tx Tx, keys []*bufferv1.GroupKey) error {
	return changeGroups(ctx, tx, keys, func(g *Group, key *bufferv1.GroupKey) error {
		if g.State != 0 && g.State != Dissolved && key.GetAttempt() <= g.Attempt {
			return nil // a repeated call
		}
		if g.State == Dissolved && key.GetAttempt() <= g.Attempt {
			return tx.Ledger().outdated(g, key)
		}
		if err := tx.DropSamples(ctx, g.Position); err != nil {
			return err
		}
		g.Attempt = key.GetAttempt()
		return tx.Ledger().move(g, Open, "")
	})
}

// outdated is the error of a decision about an attempt that is over.
func (l *Ledger) outdated(g *Group, key *bufferv1.GroupKey) error {
	return fmt.Errorf("attempt %d of the group at position %d: %w", key.GetAttempt(), g.Position,
		ErrAttempt.With("position", fmt.Sprint(g.Position)).With("attempt", fmt.Sprint(g.Attempt)))
}

// changeGroups changes the groups of some keys, also groups without a row.
func changeGroups(ctx context.Context, tx Tx, keys []*bufferv1.GroupKey, change func(*Group, *bufferv1.GroupKey) error) error {
	positions, err := tx.Ledger().positions(keys)
	if err != nil {
		return err
	}
	groups, err := tx.Groups(ctx, distinctCopy(positions))
	if err != nil {
		return err
	}
	var changed []*Group
	for i, key := range keys {
		g := groups[positions[i]]
		if g == nil {
			g = &Group{Position: positions[i]}
			groups[g.Position] = g
		}
		if err := change(g, key); err != nil {
			return err
		}
		changed = append(changed, g)
	}
	return tx.PutGroups(ctx, changed)
}

func (l *Ledger) positions(keys []*bufferv1.GroupKey) ([]uint64, error) {
	out := make([]uint64, len(keys))
	for i, key := range keys {
		p, err := l.position(key.GetEpoch(), key.GetIndex())
		if err != nil {
			return nil, err
		}
		out[i] = p
	}
	return out, nil
}
