package audit

import (
	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// checkSamples looks at each sample: of a group that has it, kept once, whole, and sampled by recorded weights.
func (a *auditor) checkSamples() {
	type place struct {
		segment uint32
		offset  uint64
		ref     string
	}
	places, missing := map[place]*bufferv1.SampleRecord{}, a.missingSegments()
	for _, s := range a.Samples {
		where := place{s.GetSegment(), s.GetRef().GetOffset(), ""}
		if s.GetSegment() > 0 { // equal artifacts of two samples are one
			if first := places[where]; first != nil {
				a.flag(a.ofSample(s), "PAYLOAD_SHARED", "its payload is also that of sample %d of group %s: one sample is counted twice",
					first.GetRef().GetKey().GetSample(), a.name(a.position(first)))
			}
			places[where] = s
		}
		g := a.groups[a.position(s)]
		if g == nil {
			a.flag(a.ofSample(s), "SAMPLE_WITHOUT_GROUP", "the ledger has the sample and not its group")
			continue
		}
		a.checkSample(g, s, missing[s.GetSegment()])
	}
	for _, g := range a.Groups {
		a.checkSize(g)
	}
}

// checkSize counts the samples of a group.
func (a *auditor) checkSize(g *bufferv1.GroupRecord) {
	distinct := map[uint32]bool{}
	for _, s := range a.samples[g.GetPosition()] {
		distinct[s.GetRef().GetKey().GetSample()] = true
	}
	n, at := uint32(len(distinct)), a.ofGroup(g)
	switch g.GetState() {
	case consumed, leased, ready:
		if n != a.config.GetGroupSize() {
			a.flag(at, "SAMPLES_MISSING", "it has %d of %d samples", n, a.config.GetGroupSize())
		}
	case excluded, dissolved:
		if g.GetReason() == zeroAdvantage { // kept, as the evidence
			if n != a.config.GetGroupSize() {
				a.flag(at, "SAMPLES_MISSING", "it was left out for equal rewards and has %d of %d samples", n, a.config.GetGroupSize())
			}
			return
		}
		if n > 0 {
			a.flag(at, "SAMPLES_LEFT", "it was given up (%s) and %d samples were kept", g.GetReason(), n)
		}
		return
	}
	if n != g.GetSamples() {
		a.flag(at, "SAMPLE_COUNT", "its row counts %d samples, there are %d", g.GetSamples(), n)
	}
}

func (a *auditor) checkSample(g *bufferv1.GroupRecord, s *bufferv1.SampleRecord, segmentMissing bool) {
	k := s.GetRef().GetKey()
	if k.GetAttempt() != g.GetKey().GetAttempt() || k.GetSample() >= a.config.GetGroupSize() {
		a.flag(a.ofSample(s), "SAMPLE_FOREIGN", "sample %d of attempt %d in a group of %d, attempt %d", k.GetSample(), k.GetAttempt(), a.config.GetGroupSize(), g.GetKey().GetAttempt())
	}
	trained := g.GetState() == consumed
	if trained {
		a.report.Samples.Trained++
		if o := s.GetRef().GetOutcome(); o != trajectoryv1.Outcome_OUTCOME_COMPLETED && o != trajectoryv1.Outcome_OUTCOME_TRUNCATED {
			a.flag(a.ofSample(s), "UNTRAINABLE", "a sample that ended as %s was trained on", o.String()[len("OUTCOME_"):])
		}
	}
	if a.config.GetReceipts() && (trained || g.GetState() == leased) {
		a.checkReceipt(g, s)
	}
	switch {
	case s.GetTrimmed():
		left := g.GetState() == excluded // nobody reads the payloads of those
		if !left && (!trained || g.GetStep() > a.Ledger.GetTrimmed()) {
			a.flag(a.ofSample(s), "PAYLOAD_DROPPED_EARLY", "its payload was dropped; a snapshot covers the steps through %d alone", a.Ledger.GetTrimmed())
		}
		if trained {
			a.report.Samples.Covered++
		}
		return
	case segmentMissing && trained && g.GetStep() <= a.Ledger.GetTrimmed():
		a.report.Samples.Covered++ // the missing file is told of once
		return
	case s.GetFlaw() != "":
		a.flag(a.ofSample(s), "PAYLOAD_DAMAGED", "%s", s.GetFlaw())
		return
	}
	want := proto.CloneOf(k)
	want.RunId = a.report.RunID
	if !proto.Equal(want, s.GetKey()) {
		a.flag(a.ofSample(s), "PAYLOAD_FOREIGN", "the payload there says that it is sample %d of group %d/%d, attempt %d, of %s",
			s.GetKey().GetSample(), s.GetKey().GetEpoch(), s.GetKey().GetIndex(), s.GetKey().GetAttempt(), s.GetKey().GetRunId())
		return
	}
	if trained {
		a.report.Samples.Verified++
		a.report.Samples.Tokens += uint64(s.GetTrained())
	}
	if a.config.GetReceipts() {
		a.checkSpans(g, s)
	}
}

// checkReceipt holds the row's receipt against the recorded weights. Step s trains version s-1.
func (a *auditor) checkReceipt(g *bufferv1.GroupRecord, s *bufferv1.SampleRecord) {
	at := a.ofSample(s)
	digest, known := a.weights[s.GetReceiptVersion()]
	switch {
	case !known:
		a.flag(at, "RECEIPT_UNKNOWN", "it was sampled by weights version %d, which are not recorded", s.GetReceiptVersion())
	case s.GetReceiptDigest() != "" && s.GetReceiptDigest() != digest:
		a.flag(at, "RECEIPT_MISMATCH", "its engine held %s as version %d, recorded is %s", s.GetReceiptDigest(), s.GetReceiptVersion(), digest)
	case s.GetReceiptDigest() != "":
		a.flag(at, "RECEIPT_UNSETTLED", "its receipt was never compared with the recorded weights")
	}
	if g.GetStep() > 0 && s.GetReceiptVersion() >= g.GetStep() {
		a.flag(at, "RECEIPT_FROM_LATER", "step %d trained on a sample of weights version %d", g.GetStep(), s.GetReceiptVersion())
	}
	if g.GetStep() > 0 && s.GetMinVersion()+uint64(a.config.GetMaxStaleness())+1 < g.GetStep() {
		a.flag(at, "STALE", "step %d trained on tokens of weights version %d; at most %d versions lie between", g.GetStep(), s.GetMinVersion(), a.config.GetMaxStaleness())
	}
}

// checkSpans holds what the payload says of each token's weights against the row and the recorded weights.
func (a *auditor) checkSpans(g *bufferv1.GroupRecord, s *bufferv1.SampleRecord) {
	at, end, named := a.ofSample(s), uint32(0), len(s.GetSpans()) > 0
	for _, span := range s.GetSpans() {
		digest, known := a.weights[span.GetVersion()]
		switch {
		case span.GetStart() != end || span.GetEnd() <= span.GetStart():
			a.flag(at, "SPANS_BROKEN", "tokens %d to %d are of no weights", end, span.GetStart())
			return
		case span.GetVersion() < s.GetMinVersion() || span.GetVersion() > s.GetReceiptVersion():
			a.flag(at, "SPAN_FOREIGN", "tokens %d to %d are of weights version %d, the ledger has %d to %d", span.GetStart(), span.GetEnd(), span.GetVersion(), s.GetMinVersion(), s.GetReceiptVersion())
		case span.GetDigest() == "":
			named = false
		case !known && g.GetState() != consumed: // the digest is still on its way
			named = false
		case span.GetDigest() != digest:
			a.flag(at, "RECEIPT_MISMATCH", "tokens %d to %d were sampled by %s as version %d, recorded is %q", span.GetStart(), span.GetEnd(), span.GetDigest(), span.GetVersion(), digest)
		}
		end = span.GetEnd()
	}
	if named && g.GetState() == consumed {
		a.report.Samples.Receipts++
	}
}

// checkSegments looks at the files.
func (a *auditor) checkSegments() {
	for _, f := range a.Segments {
		at := Break{Segment: f.GetNumber(), Offset: proto.Uint64(f.GetFlawOffset())}
		switch {
		case f.GetTrimmed():
			a.report.Segments.Covered++
		case f.GetMissing():
			a.flag(Break{Segment: f.GetNumber()}, "SEGMENT_MISSING", "segment %d is gone; the ledger counts on %d bytes of it", f.GetNumber(), f.GetBytes())
		case f.GetFileBytes() < f.GetBytes():
			a.flag(at, "SEGMENT_SHORT", "segment %d has %d bytes, %d were durable: %s", f.GetNumber(), f.GetFileBytes(), f.GetBytes(), f.GetFlaw())
		case f.GetFlaw() != "":
			a.flag(at, "SEGMENT_DAMAGED", "segment %d: %s", f.GetNumber(), f.GetFlaw())
		default:
			a.report.Segments.Whole++
			a.report.Segments.Bytes += f.GetBytes()
		}
	}
}

// missingSegments are those whose file is gone although it should be there.
func (a *auditor) missingSegments() map[uint32]bool {
	out := map[uint32]bool{}
	for _, f := range a.Segments {
		out[f.GetNumber()] = f.GetMissing() && !f.GetTrimmed()
	}
	return out
}

// trainRows are the rows of the plan's training data.
func trainRows(run *runv1.Run) (out []uint64) {
	for _, in := range run.GetPlan().GetInputs() {
		if in.GetRole() == planv1.InputRole_INPUT_ROLE_TRAIN_DATA {
			out = append(out, in.GetRows())
		}
	}
	return out
}
