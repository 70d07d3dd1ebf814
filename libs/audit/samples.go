package audit

import (
	"slices"

	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// sampleCheck checks sample records and their payloads.
type sampleCheck struct {
	*index
	*findings
	missing map[uint32]bool // segments whose file does not exist although it was not deleted
}

func newSampleCheck(x *index, f *findings) sampleCheck {
	c := sampleCheck{x, f, map[uint32]bool{}}
	for _, file := range x.Segments {
		if file.GetMissing() && !file.GetTrimmed() {
			c.missing[file.GetNumber()] = true
		}
	}
	return c
}

// prompt checks that each sample of a prompt belongs to a group, is intact, and was sampled by
// recorded weights.
func (c sampleCheck) prompt(p *Prompt) {
	for _, s := range p.Samples {
		if p.group() == nil {
			c.add(c.ofSample(p, s), "SAMPLE_WITHOUT_GROUP", "the ledger has the sample but not its group")
			continue
		}
		c.sample(p, s)
	}
}

// sizeCheck checks the samples of groups together.
type sizeCheck struct {
	*index
	*findings
}

// prompt checks the number of samples of a prompt's groups.
func (c sizeCheck) prompt(p *Prompt) {
	distinct := map[uint32]bool{}
	for _, s := range p.Samples {
		distinct[s.GetRef().GetKey().GetSample()] = true
	}
	for _, g := range p.Groups {
		c.size(g, uint32(len(distinct)))
	}
}

func (c sizeCheck) size(g *bufferv1.GroupRecord, n uint32) {
	if c.carried(g) { // its samples are in the ledger of the run before
		return
	}
	at, want := c.ofGroup(g), c.config.GetGroupSize()
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

// equalRewards checks, with dynamic sampling, that a group that was excluded for equal rewards has
// equal rewards.
func (c sizeCheck) equalRewards(p *Prompt) {
	if g := p.group(); !c.dynamic() || g.GetState() != excluded || g.GetReason() != zeroAdvantage {
		return
	}
	all := slices.DeleteFunc(slices.Clone(p.Samples), failed) // none: size reports it
	for _, s := range all {
		if first, other := all[0].GetRef().GetReward(), s.GetRef().GetReward(); first != other {
			c.add(c.ofSample(p, s), "EXCLUDED_UNEQUAL", "its group was excluded because all rewards are equal, but %v differs from %v", other, first)
			return
		}
	}
}

func (c sampleCheck) sample(p *Prompt, s *bufferv1.SampleRecord) {
	g, k := p.group(), s.GetRef().GetKey()
	if k.GetAttempt() != g.GetKey().GetAttempt() || k.GetSample() >= c.config.GetGroupSize() {
		c.add(c.ofSample(p, s), "SAMPLE_FOREIGN", "it is sample %d of attempt %d; its group has %d samples and is at attempt %d",
			k.GetSample(), k.GetAttempt(), c.config.GetGroupSize(), g.GetKey().GetAttempt())
	}
	used, trained := g.GetState() == consumed, c.trained(p, s)
	if trained {
		c.report.Samples.Trained++
		if o := s.GetRef().GetOutcome(); o != trajectoryv1.Outcome_OUTCOME_COMPLETED && o != trajectoryv1.Outcome_OUTCOME_TRUNCATED {
			c.add(c.ofSample(p, s), "UNTRAINABLE", "a sample with the outcome %s was trained on", o.String()[len("OUTCOME_"):])
		}
	}
	if c.config.GetReceipts() && (used || g.GetState() == leased) {
		c.receipt(p, s)
	}
	switch {
	case s.GetTrimmed():
		unread := g.GetState() == excluded
		if !unread && (!used || g.GetStep() > c.Ledger.GetTrimmed()) {
			c.add(c.ofSample(p, s), "PAYLOAD_DROPPED_EARLY", "its payload was deleted, but snapshots cover only the steps up to %d", c.Ledger.GetTrimmed())
		}
		if trained {
			c.report.Samples.Covered++
		}
		return
	case c.missing[s.GetSegment()] && used && g.GetStep() <= c.Ledger.GetTrimmed(): // segments reports the missing file
		if trained {
			c.report.Samples.Covered++
		}
		return
	case s.GetFlaw() != "":
		c.add(c.ofSample(p, s), "PAYLOAD_DAMAGED", "%s", s.GetFlaw())
		return
	}
	want := proto.CloneOf(k)
	want.RunId = c.report.RunID
	if from := s.GetKey().GetRunId(); slices.Contains(c.config.GetSeed().GetRunIds(), from) { // of the snapshot that the ledger began with
		want.RunId = from
	}
	if !proto.Equal(want, s.GetKey()) {
		c.add(c.ofSample(p, s), "PAYLOAD_FOREIGN", "its payload is that of sample %d of group %d/%d, attempt %d, of run %s",
			s.GetKey().GetSample(), s.GetKey().GetEpoch(), s.GetKey().GetIndex(), s.GetKey().GetAttempt(), s.GetKey().GetRunId())
		return
	}
	if trained {
		c.report.Samples.Verified++
		c.report.Samples.Tokens += uint64(s.GetTrained())
	}
	if c.config.GetReceipts() {
		c.spans(p, s)
	}
}

// trained reports whether a step trained on a sample. A failed one is left out of a consumed group
// that has enough others.
func (c sampleCheck) trained(p *Prompt, s *bufferv1.SampleRecord) bool {
	g, least := p.group(), int(c.config.GetMinGroupSize())
	if g.GetState() != consumed || least == 0 || !failed(s) {
		return g.GetState() == consumed
	}
	usable := map[uint32]bool{}
	for _, other := range p.Samples {
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
func (c sampleCheck) receipt(p *Prompt, s *bufferv1.SampleRecord) {
	g, at := p.group(), c.ofSample(p, s)
	switch {
	case len(c.ofVersion(s.GetReceiptVersion())) == 0:
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
func (c sampleCheck) spans(p *Prompt, s *bufferv1.SampleRecord) {
	g := p.group()
	at, end, named := c.ofSample(p, s), uint32(0), len(s.GetSpans()) > 0
	for _, span := range s.GetSpans() {
		known := len(c.ofVersion(span.GetVersion())) > 0
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
	if named && c.trained(p, s) {
		c.report.Samples.Receipts++
	}
}
