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
	s.WeightsDigest, s.Lineage, s.Chain = digest, l.Lineage, chainDigest(l.Chain, step, batch, digest)
	l.Step, l.Chain = step, s.Chain
	if err := tx.PutStep(ctx, s); err != nil {
		return nil, nil, err
	}
	if digest == "" { // no worker has these weights
		return s, nil, nil
	}
	d, err := readDigests(ctx, tx, []uint64{step})
	switch recorded := d.in(step, l.Lineage); {
	case err != nil:
		return nil, nil, err
	case recorded == digest:
		return s, nil, nil
	case recorded != "":
		return nil, nil, ErrDigest.With("version", fmt.Sprint(step)).With("recorded_digest", recorded)
	}
	refused, err := record(ctx, tx, Weights{Version: step, Lineage: l.Lineage, Digest: digest})
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
