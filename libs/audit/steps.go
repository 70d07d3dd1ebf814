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
	*index
	*findings
}

// chain checks that committed steps are numbered without a gap, that each chain link is made from
// the previous one and the versions that were retrained after it, and that each weights digest is
// the recorded one.
func (c stepCheck) chain() error {
	expected, link, last := c.config.GetFirstStep()+1, "", uint64(0)
	retrained := c.lineages()
	err := c.rows().Steps(func(s *bufferv1.StepRecord) error {
		at := Break{Step: s.GetStep()}
		if s.GetStep() == last {
			c.add(at, "STEP_TWICE", "step %d is recorded twice", s.GetStep())
			return nil
		}
		last = s.GetStep()
		if s.GetChain() == "" {
			return nil // leased, not committed
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
		switch digest, known := c.digest(s.GetStep(), s.GetLineage()); {
		case s.GetWeightsDigest() == "" && !c.Run.GetPlan().GetConfig().GetDeterministic():
		case !known:
			c.add(at, "WEIGHTS_MISSING", "step %d made weights version %d, which is not recorded", s.GetStep(), s.GetStep())
		case digest != s.GetWeightsDigest():
			c.add(at, "WEIGHTS_SWAPPED", "step %d made %s; weights version %d is recorded as %s", s.GetStep(), s.GetWeightsDigest(), s.GetStep(), digest)
		}
		return nil
	})
	if first := c.config.GetFirstStep(); c.report.Steps > 0 && c.config.GetReceipts() && len(c.ofVersion(first)) == 0 {
		c.add(Break{Step: first}, "WEIGHTS_MISSING", "the run began with weights version %d, which is not recorded", first)
	}
	if last := expected - 1; c.Ledger.GetState().GetStep() != last || c.Ledger.GetChain() != link {
		c.add(Break{Step: last}, "LEDGER_HEAD", "the ledger's head is step %d, link %q; its last step record is %d, link %q",
			c.Ledger.GetState().GetStep(), c.Ledger.GetChain(), last, link)
	}
	return err
}

// restores reports whether a lineage begins with the weights of an earlier step, as a gate with the
// action restore_best makes it.
func (c stepCheck) restores(l *bufferv1.LineageRecord) bool {
	allowed := false
	for _, gate := range c.Run.GetPlan().GetConfig().GetGates() {
		allowed = allowed || gate.GetAction() == "restore_best"
	}
	return allowed && slices.ContainsFunc(c.weights, func(w *bufferv1.WeightsRecord) bool {
		return w.GetVersion() < l.GetFirstVersion() && w.GetDigest() == c.digestOf(l)
	})
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
		case c.digestOf(l) == "":
			c.add(at, "LINEAGE_BROKEN", "lineage %d begins with weights version %d, which is not recorded in it", l.GetLineage(), l.GetFirstVersion())
		case c.Run.GetPlan().GetConfig().GetDeterministic() && !c.restores(l):
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

// digestOf returns the digest of the first version of a lineage.
func (c stepCheck) digestOf(l *bufferv1.LineageRecord) string {
	digest, _ := c.digest(l.GetFirstVersion(), l.GetLineage())
	return digest
}

// windows checks, with dynamic sampling, that the windows of steps are adjacent. skipped is the
// number of groups that steps before the run excluded.
func (c stepCheck) windows(skipped uint64) error {
	if !c.dynamic() {
		return nil
	}
	end, last := c.begin(), uint64(0)
	err := c.rows().Steps(func(s *bufferv1.StepRecord) error {
		if s.GetStep() == last { // chain reports it
			return nil
		}
		last = s.GetStep()
		end += uint64(s.GetGroups()) + uint64(s.GetExcluded())
		skipped += uint64(s.GetExcluded())
		if s.GetEndPosition() != end {
			c.add(Break{Step: s.GetStep()}, "STEP_WINDOW", "the record of step %d ends at position %d; the groups of all steps up to it end at %d",
				s.GetStep(), s.GetEndPosition(), end)
		}
		return nil
	})
	if count := c.Ledger.GetState().GetSkipped(); count != skipped {
		c.add(Break{}, "LEDGER_COUNTS", "the ledger counts %d groups excluded before its last step; its step records count %d", count, skipped)
	}
	return err
}

// batches compares each step with the batch that its groups and samples make.
func (c stepCheck) batches(all *batches) error {
	made, err := all.read()
	if err != nil {
		return err
	}
	return c.rows().Steps(func(s *bufferv1.StepRecord) error {
		got, err := made.of(s.GetStep())
		if err != nil {
			return err
		}
		at := Break{Step: s.GetStep()}
		if n, m := got.taken, got.skipped; n != s.GetGroups() || m != s.GetExcluded() || !c.complete(n, m) || got.zero != s.GetZeroAdvantage() {
			c.add(at, "STEP_COUNTS", "step %d recorded %d groups and %d excluded ones; the ledger has %d and %d; a step takes %d",
				s.GetStep(), s.GetGroups(), s.GetExcluded(), n, m, c.config.GetGroupsPerStep())
		}
		if got.samples != s.GetSamples() {
			c.add(at, "STEP_SAMPLES", "step %d trained on %d samples; the ledger has %d", s.GetStep(), s.GetSamples(), got.samples)
		}
		if got.id != s.GetBatchId() {
			c.add(at, "BATCH_CHANGED", "step %d trained on the batch %s; its samples in the ledger make %s", s.GetStep(), s.GetBatchId(), got.id)
		}
		return nil
	})
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
