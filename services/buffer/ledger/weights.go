package ledger

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"

	"github.com/rollout-rl/rollout/libs/id"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// Weights form lineages. The versions of lineage 0 are made by the steps. After a loss, the steps
// since the newest snapshot are trained again; the first version with another digest begins the
// next lineage:
//
//	lineage 0    v0 - v1 - v2 - v3 - v4          v3 and v4 are lost
//	lineage 1              \- v3' - v4' - v5     v5 is made by a new step
//
// The current lineage of a version is the newest one that begins at it or before. The digests of
// older lineages stay, because samples name them, but no process has these weights.

// Weights is a version of the weights.
type Weights struct {
	Version   uint64
	Lineage   uint32
	Digest    string
	Retrained uint64 // last committed step when it was retrained; 0: it was not
}

// Lineage is a lineage of the weights, other than lineage 0.
type Lineage struct {
	Number uint32              // from 1
	First  uint64              // first version
	Step   uint64              // last committed step when it began
	Old    bufferv1.OldLineage // what becomes of samples of the lost weights
}

// digests are the recorded digests of some versions.
type digests struct {
	known    map[uint64][]Weights
	lineages []Lineage
}

// readDigests reads the digests of versions. Lineages are only read if there are any.
func readDigests(ctx context.Context, r Reader, versions []uint64) (digests, error) {
	d := digests{known: map[uint64][]Weights{}}
	if len(versions) == 0 {
		return d, nil
	}
	all, err := r.Weights(ctx, distinctCopy(versions))
	if err != nil {
		return d, err
	}
	for _, w := range all {
		d.known[w.Version] = append(d.known[w.Version], w)
	}
	if r.Ledger().Lineage > 0 {
		d.lineages, err = r.Lineages(ctx)
	}
	return d, err
}

// lineageOf is the current lineage of a version.
func (d digests) lineageOf(version uint64) uint32 {
	for i := len(d.lineages) - 1; i >= 0; i-- {
		if d.lineages[i].First <= version {
			return d.lineages[i].Number
		}
	}
	return 0
}

// in is the digest of a version in a lineage, or "".
func (d digests) in(version uint64, lineage uint32) string {
	for _, w := range d.known[version] {
		if w.Lineage == lineage {
			return w.Digest
		}
	}
	return ""
}

// flaw is the reason why a sample with a receipt must not be trained on, or "". pending: the
// version is not recorded yet.
func (d digests) flaw(version uint64, digest string) (reason string, pending bool) {
	if len(d.known[version]) == 0 {
		return "", true
	}
	for _, w := range d.known[version] {
		switch {
		case w.Digest != digest:
		case w.Lineage < d.lineageOf(version) && d.lineages[len(d.lineages)-1].Old == bufferv1.OldLineage_OLD_LINEAGE_REISSUE:
			reason = ReasonOldLineage
		default:
			return "", false
		}
	}
	return cmp.Or(reason, ReasonReceiptMismatch), false
}

// Recorded is what RecordWeights did.
type Recorded struct {
	Lineage  uint32
	Forked   bool      // the version begins this lineage
	Lost     string    // its digest in the lineage before
	Reissued uint32    // groups that were dissolved because of samples of lost weights
	Refused  []Refusal // samples that the digest refutes
}

// RecordWeights records the digest of a version, and verifies the samples that waited for it. If a
// committed step made the version with another digest, the version begins a new lineage, or with
// OLD_LINEAGE_UNSPECIFIED the call fails with ErrDigest.
func RecordWeights(ctx context.Context, tx Tx, version uint64, digest string, old bufferv1.OldLineage) (Recorded, error) {
	l := tx.Ledger()
	d, err := readDigests(ctx, tx, []uint64{version})
	if err != nil {
		return Recorded{}, err
	}
	out := Recorded{Lineage: d.lineageOf(version)}
	w := Weights{Version: version, Digest: digest}
	if version > l.Config.GetFirstStep() && version <= l.Step {
		w.Retrained = l.Step
	}
	switch recorded := d.in(version, out.Lineage); {
	case recorded == digest:
		return out, nil
	case recorded != "" && (old == bufferv1.OldLineage_OLD_LINEAGE_UNSPECIFIED || w.Retrained == 0):
		return Recorded{}, ErrDigest.With("version", fmt.Sprint(version)).With("recorded_digest", recorded)
	case recorded != "":
		l.Lineage++
		out.Lineage, out.Forked, out.Lost = l.Lineage, true, recorded
		if err := fork(ctx, tx, Lineage{Number: l.Lineage, First: version, Step: l.Step, Old: old}, &out); err != nil {
			return Recorded{}, err
		}
	}
	w.Lineage = out.Lineage
	if w.Retrained > 0 {
		l.Chain = retrainedDigest(l.Chain, w)
	}
	out.Refused, err = record(ctx, tx, w)
	return out, err
}

// record adds weights and verifies the samples that waited for them.
func record(ctx context.Context, tx Tx, w Weights) ([]Refusal, error) {
	l := tx.Ledger()
	if err := tx.PutWeights(ctx, w); err != nil {
		return nil, err
	}
	if l.WeightsDigest == "" || w.Version >= l.WeightsVersion {
		l.WeightsVersion, l.WeightsDigest = w.Version, w.Digest
	}
	return verify(ctx, tx, w.Version, w.Digest)
}

// fork begins a lineage, and dissolves the groups that it makes invalid.
func fork(ctx context.Context, tx Tx, lineage Lineage, out *Recorded) error {
	l := tx.Ledger()
	l.WeightsVersion, l.WeightsDigest = 0, "" // the newest versions are lost
	if err := tx.PutLineage(ctx, lineage); err != nil || lineage.Old != bufferv1.OldLineage_OLD_LINEAGE_REISSUE {
		return err
	}
	groups, err := tx.ListGroups(ctx, GroupQuery{States: []State{Open, Ready}})
	if err != nil {
		return err
	}
	positions := make([]uint64, len(groups))
	for i, g := range groups {
		positions[i] = g.Position
	}
	samples, err := tx.Samples(ctx, distinct(positions))
	if err != nil {
		return err
	}
	lost := map[uint64]bool{}
	for i := range samples {
		if v := samples[i].ReceiptVersion; v >= lineage.First && v <= l.Step {
			lost[samples[i].Position] = true
		}
	}
	var changed []*Group
	for _, g := range groups {
		if !lost[g.Position] {
			continue
		}
		if err := tx.DropSamples(ctx, g.Position); err != nil {
			return err
		}
		if err := l.move(g, Dissolved, ReasonOldLineage); err != nil {
			return err
		}
		changed = append(changed, g)
	}
	out.Reissued = uint32(len(changed))
	return tx.PutGroups(ctx, changed)
}

// retrainedDigest is blake3 over "rollout.retrained.v1", the previous chain digest, lineage and
// version as 8 bytes little-endian each, and the weights digest.
func retrainedDigest(previous string, w Weights) string {
	h := id.NewHasher()
	b := binary.LittleEndian.AppendUint64([]byte("rollout.retrained.v1"+previous), uint64(w.Lineage))
	_, _ = h.Write(append(binary.LittleEndian.AppendUint64(b, w.Version), w.Digest...)) // a hasher never fails
	return h.ID()
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
