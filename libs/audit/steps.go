package audit

import (
	"cmp"
	"encoding/binary"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/id"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// stepCheck checks step records.
type stepCheck struct {
	*rows
	*findings
}

// chain checks that committed steps are numbered without a gap, that each chain link is made from
// the previous one and the versions that were retrained after it, and that each weights digest is
// the recorded one.
func (c stepCheck) chain() {
	expected, link, checked := c.config.GetFirstStep()+1, "", map[uint64]bool{}
	retrained := c.lineages()
	for _, s := range c.Steps {
		at := Break{Step: s.GetStep()}
		if checked[s.GetStep()] {
			c.add(at, "STEP_TWICE", "step %d is recorded twice", s.GetStep())
			continue
		}
		checked[s.GetStep()] = true
		if s.GetChain() == "" {
			continue // leased, not committed
		}
		if s.GetStep() != expected {
			c.add(Break{Step: expected}, "STEP_GAP", "step %d follows step %d: the steps between them are not recorded", s.GetStep(), expected-1)
		} else if want := chainLink(link, s); want != s.GetChain() {
			c.add(at, "CHAIN_BROKEN", "step %d: its batch, its digest and the previous link make the link %s; %s is recorded", s.GetStep(), want, s.GetChain())
		}
		expected, link = s.GetStep()+1, s.GetChain()
		for _, w := range retrained[s.GetStep()] {
			link = retrainedLink(link, w)
		}
		c.report.Steps++
		c.report.Digest = cmp.Or(c.current(s.GetStep()), s.GetWeightsDigest())
		switch digest, known := c.weightsOf[s.GetStep()][s.GetLineage()]; {
		case s.GetWeightsDigest() == "" && !c.Run.GetPlan().GetConfig().GetDeterministic():
		case !known:
			c.add(at, "WEIGHTS_MISSING", "step %d made weights version %d, which is not recorded", s.GetStep(), s.GetStep())
		case digest != s.GetWeightsDigest():
			c.add(at, "WEIGHTS_SWAPPED", "step %d made %s; weights version %d is recorded as %s", s.GetStep(), s.GetWeightsDigest(), s.GetStep(), digest)
		}
	}
	if first := c.config.GetFirstStep(); c.report.Steps > 0 && c.config.GetReceipts() && len(c.weightsOf[first]) == 0 {
		c.add(Break{Step: first}, "WEIGHTS_MISSING", "the run began with weights version %d, which is not recorded", first)
	}
	if last := expected - 1; c.Ledger.GetState().GetStep() != last || c.Ledger.GetChain() != link {
		c.add(Break{Step: last}, "LEDGER_HEAD", "the ledger's head is step %d, link %q; its last step record is %d, link %q",
			c.Ledger.GetState().GetStep(), c.Ledger.GetChain(), last, link)
	}
}

// lineages checks that lineages are numbered, and that each begins with a version that was
// retrained after the weights of a committed step were lost. It returns the retrained versions by
// the last step that was committed before, in the order in which they were recorded.
func (c stepCheck) lineages() map[uint64][]*bufferv1.WeightsRecord {
	for i, l := range c.Lineages {
		at := Break{Step: l.GetFirstVersion()}
		switch {
		case l.GetLineage() != uint32(i)+1:
			c.add(at, "LINEAGE_GAP", "lineage %d follows lineage %d", l.GetLineage(), i)
		case c.weightsOf[l.GetFirstVersion()][l.GetLineage()] == "":
			c.add(at, "LINEAGE_BROKEN", "lineage %d begins with weights version %d, which is not recorded in it", l.GetLineage(), l.GetFirstVersion())
		case c.Run.GetPlan().GetConfig().GetDeterministic():
			c.add(at, "LINEAGE_FORBIDDEN", "lineage %d begins with weights version %d; the run is deterministic, so retraining must give the same bits",
				l.GetLineage(), l.GetFirstVersion())
		}
		c.report.Lineages = append(c.report.Lineages, Lineage{
			Lineage: l.GetLineage(), First: l.GetFirstVersion(), Step: l.GetStep(),
			OldLineage: strings.ToLower(strings.TrimPrefix(l.GetOldLineage().String(), "OLD_LINEAGE_")),
		})
	}
	if newest := c.Ledger.GetState().GetLineage(); int(newest) != len(c.Lineages) {
		c.add(Break{}, "LINEAGE_GAP", "the ledger is at lineage %d; it has records of %d", newest, len(c.Lineages))
	}
	retrained := map[uint64][]*bufferv1.WeightsRecord{}
	for _, w := range c.Weights {
		if w.GetRetrainedAt() > 0 {
			retrained[w.GetRetrainedAt()] = append(retrained[w.GetRetrainedAt()], w)
		}
	}
	for _, list := range retrained {
		slices.SortFunc(list, func(x, y *bufferv1.WeightsRecord) int {
			return cmp.Or(cmp.Compare(x.GetLineage(), y.GetLineage()), cmp.Compare(x.GetVersion(), y.GetVersion()))
		})
	}
	return retrained
}

// windows checks, with dynamic sampling, that the windows of steps are adjacent and that groups
// excluded for equal rewards have equal rewards.
func (c stepCheck) windows() {
	if !c.dynamic() {
		return
	}
	end, skipped := c.begin(), uint64(0)
	for _, g := range c.Groups {
		if g.GetState() == excluded && c.carried(g) {
			skipped++
		}
	}
	for _, s := range c.Steps {
		end += uint64(s.GetGroups()) + uint64(s.GetExcluded())
		skipped += uint64(s.GetExcluded())
		if s.GetEndPosition() != end {
			c.add(Break{Step: s.GetStep()}, "STEP_WINDOW", "the record of step %d ends at position %d; the groups of all steps up to it end at %d",
				s.GetStep(), s.GetEndPosition(), end)
		}
	}
	if count := c.Ledger.GetState().GetSkipped(); count != skipped {
		c.add(Break{}, "LEDGER_COUNTS", "the ledger counts %d groups excluded before its last step; its step records count %d", count, skipped)
	}
	for _, g := range c.Groups {
		if g.GetState() == excluded && g.GetReason() == zeroAdvantage {
			c.equalRewards(g)
		}
	}
}

func (c stepCheck) equalRewards(g *bufferv1.GroupRecord) {
	all := slices.DeleteFunc(slices.Clone(c.samplesAt[g.GetPosition()]), failed) // none: sampleCheck.size reports it
	for _, s := range all {
		if first, other := all[0].GetRef().GetReward(), s.GetRef().GetReward(); first != other {
			c.add(c.ofSample(s), "EXCLUDED_UNEQUAL", "its group was excluded because all rewards are equal, but %v differs from %v", other, first)
			return
		}
	}
}

// batches recomputes the batch of each step from groups and samples.
func (c stepCheck) batches() {
	taken, skipped, zero := map[uint64][]*bufferv1.GroupRecord{}, map[uint64]uint32{}, map[uint64]uint32{}
	for _, g := range c.Groups {
		switch g.GetState() {
		case consumed, leased:
			taken[g.GetStep()] = append(taken[g.GetStep()], g)
		case excluded:
			skipped[g.GetStep()]++
			if g.GetReason() == zeroAdvantage {
				zero[g.GetStep()]++
			}
		}
	}
	for _, s := range c.Steps {
		at, groups := Break{Step: s.GetStep()}, taken[s.GetStep()]
		slices.SortFunc(groups, func(x, y *bufferv1.GroupRecord) int { return cmp.Compare(x.GetPosition(), y.GetPosition()) })
		var samples []*bufferv1.SampleRecord
		for _, g := range groups {
			samples = append(samples, c.samplesAt[g.GetPosition()]...)
		}
		if n, m := uint32(len(groups)), skipped[s.GetStep()]; n != s.GetGroups() || m != s.GetExcluded() || !c.complete(n, m) || zero[s.GetStep()] != s.GetZeroAdvantage() {
			c.add(at, "STEP_COUNTS", "step %d recorded %d groups and %d excluded ones; the ledger has %d and %d; a step takes %d",
				s.GetStep(), s.GetGroups(), s.GetExcluded(), n, m, c.config.GetGroupsPerStep())
		}
		if uint32(len(samples)) != s.GetSamples() {
			c.add(at, "STEP_SAMPLES", "step %d trained on %d samples; the ledger has %d", s.GetStep(), s.GetSamples(), len(samples))
		}
		if got := batchID(samples); got != s.GetBatchId() {
			c.add(at, "BATCH_CHANGED", "step %d trained on the batch %s; its samples in the ledger make %s", s.GetStep(), s.GetBatchId(), got)
		}
	}
}

// chainLink is blake3 over "rollout.chain.v1", the previous link, the step as 8 bytes
// little-endian, the batch and the weights digest.
func chainLink(previous string, s *bufferv1.StepRecord) string {
	h := id.NewHasher()
	b := binary.LittleEndian.AppendUint64([]byte("rollout.chain.v1"+previous), s.GetStep())
	_, _ = h.Write(append(b, s.GetBatchId()+s.GetWeightsDigest()...)) // a hasher never fails
	return h.ID()
}

// retrainedLink is blake3 over "rollout.retrained.v1", the previous link, lineage and version as 8
// bytes little-endian each, and the weights digest.
func retrainedLink(previous string, w *bufferv1.WeightsRecord) string {
	h := id.NewHasher()
	b := binary.LittleEndian.AppendUint64([]byte("rollout.retrained.v1"+previous), uint64(w.GetLineage()))
	_, _ = h.Write(append(binary.LittleEndian.AppendUint64(b, w.GetVersion()), w.GetDigest()...)) // a hasher never fails
	return h.ID()
}

// batchID is blake3 over "rollout.batch.v1" and, for each sample, epoch, index, attempt, sample,
// part and CRC-32C as 8-byte little-endian integers.
func batchID(samples []*bufferv1.SampleRecord) string {
	h := id.NewHasher()
	b := []byte("rollout.batch.v1")
	for _, s := range samples {
		k := s.GetRef().GetKey()
		for _, n := range [6]uint64{uint64(k.GetEpoch()), k.GetIndex(), uint64(k.GetAttempt()), uint64(k.GetSample()), uint64(k.GetPart()), uint64(s.GetRef().GetCrc32C())} {
			b = binary.LittleEndian.AppendUint64(b, n)
		}
	}
	_, _ = h.Write(b)
	return h.ID()
}
