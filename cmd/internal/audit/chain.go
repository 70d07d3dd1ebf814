package audit

import (
	"encoding/binary"
	"slices"

	"github.com/rollout-rl/rollout/libs/id"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// checkSteps walks the committed steps: numbered without a gap, each link made from the one before, each digest the recorded one.
func (a *auditor) checkSteps() {
	expected, link := a.config.GetFirstStep()+1, ""
	for _, s := range a.Steps {
		at := Break{Step: s.GetStep()}
		if _, twice := a.steps[s.GetStep()]; twice {
			a.flag(at, "STEP_TWICE", "step %d is recorded twice", s.GetStep())
			continue
		}
		a.steps[s.GetStep()] = s
		if s.GetWeightsDigest() == "" {
			continue // leased
		}
		if s.GetStep() != expected {
			a.flag(Break{Step: expected}, "STEP_GAP", "step %d follows step %d: what is between them is not recorded", s.GetStep(), expected-1)
		} else if want := chainLink(link, s); want != s.GetChain() {
			a.flag(at, "CHAIN_BROKEN", "step %d: batch, digest and the link before it give the link %s; recorded is %s", s.GetStep(), want, s.GetChain())
		}
		expected, link = s.GetStep()+1, s.GetChain()
		a.report.Steps++
		a.report.Digest = s.GetWeightsDigest()
		switch digest, known := a.weights[s.GetStep()]; {
		case !known:
			a.flag(at, "WEIGHTS_MISSING", "no weights of version %d are recorded, which step %d made", s.GetStep(), s.GetStep())
		case digest != s.GetWeightsDigest():
			a.flag(at, "WEIGHTS_SWAPPED", "step %d made %s; recorded as version %d is %s", s.GetStep(), s.GetWeightsDigest(), s.GetStep(), digest)
		}
	}
	if a.report.Steps > 0 && a.config.GetReceipts() && a.weights[a.config.GetFirstStep()] == "" {
		a.flag(Break{Step: a.config.GetFirstStep()}, "WEIGHTS_MISSING", "the weights that the run began with (version %d) are not recorded", a.config.GetFirstStep())
	}
	if last := expected - 1; a.Ledger.GetState().GetStep() != last || a.Ledger.GetChain() != link {
		a.flag(Break{Step: last}, "LEDGER_HEAD", "the ledger stands at step %d, link %q; its steps end with %d, link %q",
			a.Ledger.GetState().GetStep(), a.Ledger.GetChain(), last, link)
	}
}

// checkBatches makes the batch of each step again from groups and samples.
func (a *auditor) checkBatches() {
	taken, skipped, zero := map[uint64][]*bufferv1.GroupRecord{}, map[uint64]uint32{}, map[uint64]uint32{}
	for _, g := range a.Groups {
		switch g.GetState() {
		case bufferv1.GroupState_GROUP_STATE_CONSUMED, bufferv1.GroupState_GROUP_STATE_LEASED:
			taken[g.GetStep()] = append(taken[g.GetStep()], g)
		case bufferv1.GroupState_GROUP_STATE_EXCLUDED:
			skipped[g.GetStep()]++
			if g.GetReason() == zeroAdvantage {
				zero[g.GetStep()]++
			}
		}
	}
	for _, s := range a.Steps {
		at, groups := Break{Step: s.GetStep()}, taken[s.GetStep()]
		slices.SortFunc(groups, func(x, y *bufferv1.GroupRecord) int { return int(int64(x.GetPosition()) - int64(y.GetPosition())) })
		var samples []*bufferv1.SampleRecord
		for _, g := range groups {
			samples = append(samples, a.samples[g.GetPosition()]...)
		}
		if n, m := uint32(len(groups)), skipped[s.GetStep()]; n != s.GetGroups() || m != s.GetExcluded() || !a.fits(n, m) || zero[s.GetStep()] != s.GetZeroAdvantage() {
			a.flag(at, "STEP_COUNTS", "step %d recorded %d groups and %d excluded ones, the ledger has %d and %d of it; a step takes %d",
				s.GetStep(), s.GetGroups(), s.GetExcluded(), n, m, a.config.GetGroupsPerStep())
		}
		if uint32(len(samples)) != s.GetSamples() {
			a.flag(at, "STEP_SAMPLES", "step %d trained on %d samples, the ledger has %d of it", s.GetStep(), s.GetSamples(), len(samples))
		}
		if got := batchID(samples); got != s.GetBatchId() {
			a.flag(at, "BATCH_CHANGED", "step %d trained on the batch %s; its samples now make %s", s.GetStep(), s.GetBatchId(), got)
		}
	}
}

// checkSnapshots compares training states with the steps that they are of.
func (a *auditor) checkSnapshots() {
	for _, s := range a.Snapshots {
		if s.GetKind() != snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE || s.GetRunId() != a.report.RunID {
			continue
		}
		at, step := Break{Step: s.GetStep()}, a.steps[s.GetStep()]
		switch {
		case step == nil || step.GetWeightsDigest() == "":
			a.flag(at, "SNAPSHOT_AHEAD", "snapshot %s is of step %d, which the ledger does not know", s.GetSnapshotId(), s.GetStep())
		case step.GetWeightsDigest() != s.GetWeightsDigest() && a.Run.GetPlan().GetConfig().GetDeterministic():
			a.flag(at, "SNAPSHOT_DIGEST", "snapshot %s holds %s, step %d made %s", s.GetSnapshotId(), s.GetWeightsDigest(), s.GetStep(), step.GetWeightsDigest())
		}
		p := step.GetEndPosition()
		if p == 0 { // of before steps said so
			p = s.GetStep() * uint64(a.config.GetGroupsPerStep())
		}
		if s.GetCursor().GetPosition() != p {
			a.flag(at, "SNAPSHOT_CURSOR", "snapshot %s would go on at position %d, step %d ends at %d", s.GetSnapshotId(), s.GetCursor().GetPosition(), s.GetStep(), p)
		}
	}
}

// checkState looks whether the files of the snapshots are there, whole: a recovery begins with the newest, and no other stands for the
// payloads that it let go.
func (a *auditor) checkState() {
	a.report.Files = a.Files
	for _, s := range a.Snapshots {
		if s.GetRunId() != a.report.RunID {
			continue
		}
		for _, f := range s.GetFiles() {
			switch at := (Break{Step: s.GetStep()}); {
			case slices.Contains(a.Missing, f.GetDigest()):
				a.flag(at, "SNAPSHOT_MISSING", "snapshot %s has lost its file %s, %s", s.GetSnapshotId(), f.GetPath(), f.GetDigest())
			case slices.Contains(a.Corrupt, f.GetDigest()):
				a.flag(at, "SNAPSHOT_CORRUPT", "file %s of snapshot %s holds other bytes than %s", f.GetPath(), s.GetSnapshotId(), f.GetDigest())
			}
		}
	}
}

// chainLink is blake3 over "rollout.chain.v1", the previous link, the step as 8 bytes little-endian, batch and weights digest.
func chainLink(previous string, s *bufferv1.StepRecord) string {
	h := id.NewHasher()
	b := binary.LittleEndian.AppendUint64([]byte("rollout.chain.v1"+previous), s.GetStep())
	_, _ = h.Write(append(b, s.GetBatchId()+s.GetWeightsDigest()...)) // a hasher never fails
	return h.ID()
}

// batchID is blake3 over "rollout.batch.v1" and of each sample epoch, index, attempt, sample, part and CRC-32C as 8-byte
// little-endian integers.
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
