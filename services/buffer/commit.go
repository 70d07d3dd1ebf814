package buffer

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/rollout-rl/rollout/libs/id"
)

// commit consumes the leased batch of a step. ErrLease, ErrStep, ErrDigest.
func commit(ctx context.Context, tx Tx, step uint64, batch, digest string) (*Step, []Refusal, error) {
	l := tx.Ledger()
	s, err := tx.Step(ctx, step)
	switch {
	case err != nil:
		return nil, nil, err
	case s == nil:
		return nil, nil, ErrLease.With("step", fmt.Sprint(step)).With("committed", fmt.Sprint(l.Step))
	case s.Batch != batch:
		return nil, nil, ErrStep.With("step", fmt.Sprint(step)).With("recorded_batch", s.Batch)
	case s.WeightsDigest == digest:
		return s, nil, nil
	case s.WeightsDigest != "":
		return nil, nil, ErrStep.With("step", fmt.Sprint(step)).With("recorded_digest", s.WeightsDigest)
	}
	n, err := tx.TakeGroups(ctx, step, Leased, Consumed)
	if err != nil {
		return nil, nil, err
	}
	l.Groups[Leased] -= n
	l.Groups[Consumed] += n
	s.WeightsDigest, s.Chain = digest, link(l.Chain, step, batch, digest)
	l.Step, l.Chain = step, s.Chain
	if err := tx.PutStep(ctx, s); err != nil {
		return nil, nil, err
	}
	refused, err := record(ctx, tx, step, digest)
	return s, refused, err
}

// link is blake3 over "rollout.chain.v1", the previous link, the step as 8 bytes little-endian, batch and weights digest.
func link(previous string, step uint64, batch, digest string) string {
	h := id.NewHasher()
	_, _ = h.Write([]byte("rollout.chain.v1" + previous))
	_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, step))
	_, _ = h.Write([]byte(batch + digest))
	return h.ID()
}

// record notes the digest of a version and settles the samples that waited for it. ErrDigest.
func record(ctx context.Context, tx Tx, version uint64, digest string) ([]Refusal, error) {
	l := tx.Ledger()
	known, err := tx.Weights(ctx, []uint64{version})
	if err != nil {
		return nil, err
	}
	if was, ok := known[version]; ok {
		if was != digest {
			return nil, ErrDigest.With("version", fmt.Sprint(version)).With("recorded_digest", was)
		}
		return nil, nil
	}
	if err := tx.PutWeights(ctx, version, digest); err != nil {
		return nil, err
	}
	if l.WeightsDigest == "" || version >= l.WeightsVersion {
		l.WeightsVersion, l.WeightsDigest = version, digest
	}
	return settle(ctx, tx, version, digest)
}

// settle checks the samples that came before their version's digest: groups of a wrong receipt are dissolved.
func settle(ctx context.Context, tx Tx, version uint64, digest string) ([]Refusal, error) {
	l := tx.Ledger()
	waiting, err := tx.Pending(ctx, version)
	if err != nil || len(waiting) == 0 {
		return nil, err
	}
	rows := l.Config.GetRows()
	var refused []Refusal
	var positions []uint64
	wrong, settled := map[uint64]bool{}, map[uint64]uint32{}
	for i := range waiting {
		s := &waiting[i]
		positions = append(positions, s.Position)
		settled[s.Position]++
		if s.ReceiptDigest != digest {
			wrong[s.Position] = true
			l.Refused++
			refused = append(refused, Refusal{Reason: ReasonReceiptMismatch, Epoch: uint32(s.Position / rows), Index: s.Position % rows,
				Attempt: s.Attempt, Sample: s.Sample})
		}
	}
	if err := tx.Verify(ctx, version); err != nil {
		return nil, err
	}
	positions = unique(positions)
	groups, err := tx.Groups(ctx, distinct(append([]uint64(nil), positions...)))
	if err != nil {
		return nil, err
	}
	spreads, err := rewardsOf(ctx, tx, positions)
	if err != nil {
		return nil, err
	}
	var changed []*Group
	for _, p := range positions {
		g := groups[p]
		changed = append(changed, g)
		if wrong[p] {
			if err := tx.DropSamples(ctx, p); err != nil {
				return nil, err
			}
			g.Failures++
			if err := l.move(g, Dissolved, ReasonReceiptMismatch); err != nil {
				return nil, err
			}
			continue
		}
		g.Pending -= settled[p]
		if err := l.complete(g, spreads[p]); err != nil {
			return nil, err
		}
	}
	return refused, tx.PutGroups(ctx, changed)
}
