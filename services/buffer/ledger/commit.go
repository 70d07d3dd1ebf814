package ledger

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/rollout-rl/rollout/libs/id"
)

// Commit records that the leased batch of a step is consumed and which weights the step made. It
// also returns the samples that the digest of those weights refutes; digest is empty if it was not
// computed. A repeated call changes nothing. ErrLease, ErrStep, ErrDigest.
func Commit(ctx context.Context, tx Tx, step uint64, batch, digest string) (*Step, []Refusal, error) {
	l := tx.Ledger()
	s, err := tx.Step(ctx, step)
	switch {
	case err != nil:
		return nil, nil, err
	case s == nil:
		return nil, nil, ErrLease.With("step", fmt.Sprint(step)).With("committed", fmt.Sprint(l.Step))
	case s.Batch != batch:
		return nil, nil, ErrStep.With("step", fmt.Sprint(step)).With("recorded_batch", s.Batch)
	case s.Chain != "" && s.WeightsDigest == digest:
		return s, nil, nil
	case s.Chain != "":
		return nil, nil, ErrStep.With("step", fmt.Sprint(step)).With("recorded_digest", s.WeightsDigest)
	}
	n, err := tx.TakeGroups(ctx, step, Leased, Consumed)
	if err != nil {
		return nil, nil, err
	}
	l.Groups[Leased] -= n
	l.Groups[Consumed] += n
	s.WeightsDigest, s.Chain = digest, chainDigest(l.Chain, step, batch, digest)
	l.Step, l.Chain = step, s.Chain
	if err := tx.PutStep(ctx, s); err != nil {
		return nil, nil, err
	}
	if digest == "" { // no worker has these weights
		return s, nil, nil
	}
	refused, err := RecordWeights(ctx, tx, step, digest)
	return s, refused, err
}

// chainDigest is blake3 over "rollout.chain.v1", the previous digest, the step as 8 bytes
// little-endian, batch and weights digest.
func chainDigest(previous string, step uint64, batch, digest string) string {
	h := id.NewHasher()
	_, _ = h.Write([]byte("rollout.chain.v1" + previous))
	_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, step))
	_, _ = h.Write([]byte(batch + digest))
	return h.ID()
}

// RecordWeights records the digest of a version and verifies the samples that waited for it. It
// returns those that do not match. ErrDigest.
func RecordWeights(ctx context.Context, tx Tx, version uint64, digest string) ([]Refusal, error) {
	l := tx.Ledger()
	known, err := tx.Weights(ctx, []uint64{version})
	if err != nil {
		return nil, err
	}
	if recorded, ok := known[version]; ok {
		if recorded != digest {
			return nil, ErrDigest.With("version", fmt.Sprint(version)).With("recorded_digest", recorded)
		}
		return nil, nil
	}
	if err := tx.PutWeights(ctx, version, digest); err != nil {
		return nil, err
	}
	if l.WeightsDigest == "" || version >= l.WeightsVersion {
		l.WeightsVersion, l.WeightsDigest = version, digest
	}
	return verify(ctx, tx, version, digest)
}

// verify checks the samples that arrived before the digest of their version. Groups with a wrong
// receipt are dissolved.
func verify(ctx context.Context, tx Tx, version uint64, digest string) ([]Refusal, error) {
	l := tx.Ledger()
	waiting, err := tx.Pending(ctx, version)
	if err != nil || len(waiting) == 0 {
		return nil, err
	}
	rows := l.Config.GetRows()
	var refused []Refusal
	var positions []uint64
	wrong, verified := map[uint64]bool{}, map[uint64]uint32{}
	for i := range waiting {
		s := &waiting[i]
		positions = append(positions, s.Position)
		verified[s.Position]++
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
	groups, err := tx.Groups(ctx, distinctCopy(positions))
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
		g.Pending -= verified[p]
		if err := l.complete(g, spreads[p]); err != nil {
			return nil, err
		}
	}
	return refused, tx.PutGroups(ctx, changed)
}
