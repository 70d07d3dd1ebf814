package audit

import (
	"slices"

	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// sampleCheck checks sample records, their payloads, and the segments that contain them.
type sampleCheck struct {
	*rows
	*findings
}

// records checks that each sample belongs to a group, is stored once, is intact, and was sampled by
// recorded weights.
func (c sampleCheck) records() {
	type place struct {
		segment uint32
		offset  uint64
	}
	at, missing := map[place]*bufferv1.SampleRecord{}, c.missingSegments()
	for _, s := range c.Samples {
		if s.GetSegment() > 0 { // artifacts are content-addressed: equal samples share one
			where := place{s.GetSegment(), s.GetRef().GetOffset()}
			if first := at[where]; first != nil {
				c.add(c.ofSample(s), "PAYLOAD_SHARED", "its payload is also that of sample %d of group %s: one sample is counted twice",
					first.GetRef().GetKey().GetSample(), c.name(c.position(first)))
			}
			at[where] = s
		}
		g := c.groupAt[c.position(s)]
		if g == nil {
			c.add(c.ofSample(s), "SAMPLE_WITHOUT_GROUP", "the ledger has the sample but not its group")
			continue
		}
		c.sample(g, s, missing[s.GetSegment()])
	}
	for _, g := range c.Groups {
		c.size(g)
	}
}

// size checks the number of samples of a group.
func (c sampleCheck) size(g *bufferv1.GroupRecord) {
	if c.carried(g) { // its samples are in the ledger of the run before
		return
	}
	distinct := map[uint32]bool{}
	for _, s := range c.samplesAt[g.GetPosition()] {
		distinct[s.GetRef().GetKey().GetSample()] = true
	}
	n, at, want := uint32(len(distinct)), c.ofGroup(g), c.config.GetGroupSize()
	switch g.GetState() {
	case consumed, leased, ready:
		if n != want {
			c.add(at, "SAMPLES_MISSING", "it has %d of %d samples", n, want)
		}
	case excluded, dissolved:
		switch {
		case g.GetReason() != zeroAdvantage && n > 0:
			c.add(at, "SAMPLES_LEFT", "it was given up (%s), but has %d samples", g.GetReason(), n)
		case g.GetReason() == zeroAdvantage && n != want: // kept as evidence
			c.add(at, "SAMPLES_MISSING", "it was excluded for equal rewards and has %d of %d samples", n, want)
		}
		return
	}
	if n != g.GetSamples() {
		c.add(at, "SAMPLE_COUNT", "its record counts %d samples; there are %d", g.GetSamples(), n)
	}
}

func (c sampleCheck) sample(g *bufferv1.GroupRecord, s *bufferv1.SampleRecord, segmentMissing bool) {
	k := s.GetRef().GetKey()
	if k.GetAttempt() != g.GetKey().GetAttempt() || k.GetSample() >= c.config.GetGroupSize() {
		c.add(c.ofSample(s), "SAMPLE_FOREIGN", "it is sample %d of attempt %d; its group has %d samples and is at attempt %d",
			k.GetSample(), k.GetAttempt(), c.config.GetGroupSize(), g.GetKey().GetAttempt())
	}
	used, trained := g.GetState() == consumed, c.trained(g, s)
	if trained {
		c.report.Samples.Trained++
		if o := s.GetRef().GetOutcome(); o != trajectoryv1.Outcome_OUTCOME_COMPLETED && o != trajectoryv1.Outcome_OUTCOME_TRUNCATED {
			c.add(c.ofSample(s), "UNTRAINABLE", "a sample with the outcome %s was trained on", o.String()[len("OUTCOME_"):])
		}
	}
	if c.config.GetReceipts() && (used || g.GetState() == leased) {
		c.receipt(g, s)
	}
	switch {
	case s.GetTrimmed():
		unread := g.GetState() == excluded
		if !unread && (!used || g.GetStep() > c.Ledger.GetTrimmed()) {
			c.add(c.ofSample(s), "PAYLOAD_DROPPED_EARLY", "its payload was deleted, but snapshots cover only the steps up to %d", c.Ledger.GetTrimmed())
		}
		if trained {
			c.report.Samples.Covered++
		}
		return
	case segmentMissing && used && g.GetStep() <= c.Ledger.GetTrimmed(): // segments reports the missing file
		if trained {
			c.report.Samples.Covered++
		}
		return
	case s.GetFlaw() != "":
		c.add(c.ofSample(s), "PAYLOAD_DAMAGED", "%s", s.GetFlaw())
		return
	}
	want := proto.CloneOf(k)
	want.RunId = c.report.RunID
	if from := s.GetKey().GetRunId(); slices.Contains(c.config.GetSeed().GetRunIds(), from) { // of the snapshot that the ledger began with
		want.RunId = from
	}
	if !proto.Equal(want, s.GetKey()) {
		c.add(c.ofSample(s), "PAYLOAD_FOREIGN", "its payload is that of sample %d of group %d/%d, attempt %d, of run %s",
			s.GetKey().GetSample(), s.GetKey().GetEpoch(), s.GetKey().GetIndex(), s.GetKey().GetAttempt(), s.GetKey().GetRunId())
		return
	}
	if trained {
		c.report.Samples.Verified++
		c.report.Samples.Tokens += uint64(s.GetTrained())
	}
	if c.config.GetReceipts() {
		c.spans(g, s)
	}
}

// trained reports whether a step trained on a sample. A failed one is left out of a consumed group
// that has enough others.
func (c sampleCheck) trained(g *bufferv1.GroupRecord, s *bufferv1.SampleRecord) bool {
	least := int(c.config.GetMinGroupSize())
	if g.GetState() != consumed || least == 0 || !failed(s) {
		return g.GetState() == consumed
	}
	usable := map[uint32]bool{}
	for _, other := range c.samplesAt[g.GetPosition()] {
		if !failed(other) {
			usable[other.GetRef().GetKey().GetSample()] = true
		}
	}
	return len(usable) < least
}

func failed(s *bufferv1.SampleRecord) bool {
	return s.GetRef().GetOutcome() == trajectoryv1.Outcome_OUTCOME_INFRA_FAILED
}

// receipt compares the weights receipt of a sample with the recorded weights. Step s trains version
// s-1.
func (c sampleCheck) receipt(g *bufferv1.GroupRecord, s *bufferv1.SampleRecord) {
	at := c.ofSample(s)
	switch {
	case len(c.weightsOf[s.GetReceiptVersion()]) == 0:
		c.add(at, "RECEIPT_UNKNOWN", "it was sampled by weights version %d, which is not recorded", s.GetReceiptVersion())
	case s.GetReceiptDigest() != "" && !c.recorded(s.GetReceiptVersion(), s.GetReceiptDigest()):
		c.add(at, "RECEIPT_MISMATCH", "its engine had %s as weights version %d; %s is recorded", s.GetReceiptDigest(), s.GetReceiptVersion(), c.current(s.GetReceiptVersion()))
	case s.GetReceiptDigest() != "":
		c.add(at, "RECEIPT_UNSETTLED", "its receipt was not compared with the recorded weights")
	}
	if g.GetStep() > 0 && s.GetReceiptVersion() >= g.GetStep() {
		c.add(at, "RECEIPT_FROM_LATER", "step %d trained on a sample of weights version %d", g.GetStep(), s.GetReceiptVersion())
	}
	if g.GetStep() > 0 && s.GetMinVersion()+uint64(c.config.GetMaxStaleness())+1 < g.GetStep() {
		c.add(at, "STALE", "step %d trained on tokens of weights version %d; the maximum staleness is %d", g.GetStep(), s.GetMinVersion(), c.config.GetMaxStaleness())
	}
}

// spans compares the version spans of a payload with its record and the recorded weights.
func (c sampleCheck) spans(g *bufferv1.GroupRecord, s *bufferv1.SampleRecord) {
	at, end, named := c.ofSample(s), uint32(0), len(s.GetSpans()) > 0
	for _, span := range s.GetSpans() {
		known := len(c.weightsOf[span.GetVersion()]) > 0
		switch {
		case span.GetStart() != end || span.GetEnd() <= span.GetStart():
			c.add(at, "SPANS_BROKEN", "tokens %d to %d have no weights version", end, span.GetStart())
			return
		case span.GetVersion() < s.GetMinVersion() || span.GetVersion() > s.GetReceiptVersion():
			c.add(at, "SPAN_FOREIGN", "tokens %d to %d are of weights version %d; the ledger has versions %d to %d",
				span.GetStart(), span.GetEnd(), span.GetVersion(), s.GetMinVersion(), s.GetReceiptVersion())
		case span.GetDigest() == "":
			named = false
		case !known && g.GetState() != consumed: // the digest may not have arrived yet
			named = false
		case !c.recorded(span.GetVersion(), span.GetDigest()):
			c.add(at, "RECEIPT_MISMATCH", "tokens %d to %d were sampled by %s as weights version %d; %q is recorded",
				span.GetStart(), span.GetEnd(), span.GetDigest(), span.GetVersion(), c.current(span.GetVersion()))
		}
		end = span.GetEnd()
	}
	if named && c.trained(g, s) {
		c.report.Samples.Receipts++
	}
}

// segments checks the payload files.
func (c sampleCheck) segments() {
	for _, f := range c.Segments {
		at := Break{Segment: f.GetNumber(), Offset: proto.Uint64(f.GetFlawOffset())}
		switch {
		case f.GetTrimmed():
			c.report.Segments.Covered++
		case f.GetMissing():
			c.add(Break{Segment: f.GetNumber()}, "SEGMENT_MISSING", "segment %d does not exist; the ledger refers to %d bytes of it", f.GetNumber(), f.GetBytes())
		case f.GetFileBytes() < f.GetBytes():
			c.add(at, "SEGMENT_SHORT", "segment %d has %d bytes; %d were durable: %s", f.GetNumber(), f.GetFileBytes(), f.GetBytes(), f.GetFlaw())
		case f.GetFlaw() != "":
			c.add(at, "SEGMENT_DAMAGED", "segment %d: %s", f.GetNumber(), f.GetFlaw())
		default:
			c.report.Segments.Whole++
			c.report.Segments.Bytes += f.GetBytes()
		}
	}
}

// missingSegments returns the segments whose file does not exist although it was not deleted.
func (c sampleCheck) missingSegments() map[uint32]bool {
	out := map[uint32]bool{}
	for _, f := range c.Segments {
		out[f.GetNumber()] = f.GetMissing() && !f.GetTrimmed()
	}
	return out
}
