package ledger

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// Reasons of refusals and dissolutions that the ledger gives.
const (
	ReasonBadKey          = "BAD_KEY"
	ReasonGroupSize       = "GROUP_SIZE_MISMATCH"
	ReasonReceiptMissing  = "RECEIPT_MISSING"
	ReasonReceiptMismatch = "RECEIPT_MISMATCH"
	ReasonPartsMissing    = "PARTS_MISSING" // the put lacks other parts of the sample
	ReasonPayloadMissing  = "PAYLOAD_MISSING"
	ReasonPayloadCorrupt  = "PAYLOAD_CORRUPT"
	ReasonStale           = "STALE"
	ReasonOldLineage      = "OLD_LINEAGE"    // sampled by weights that were lost, with OLD_LINEAGE_REISSUE
	ReasonUnknown         = "INFRA_FAILED"   // of a failed sample that names none
	ReasonZeroAdvantage   = "ZERO_ADVANTAGE" // all rewards of the group are equal
)

// Arrival is one trajectory that was received, with the place of its payload.
type Arrival struct {
	Header  *trajectoryv1.TrajectoryHeader
	Segment uint32 // 0: the payload is in the storage service, or was not stored
	Offset  uint64
	Length  uint64
	Ref     string // content id in the storage service
	CRC     uint32
	Flaw    string // why the payload cannot be stored, such as PAYLOAD_CORRUPT; "": it can
}

// Trained reports whether samples of an outcome are trained on. The payloads of others are stored
// only for those that are left out of their group.
func Trained(o trajectoryv1.Outcome) bool {
	return o == trajectoryv1.Outcome_OUTCOME_COMPLETED || o == trajectoryv1.Outcome_OUTCOME_TRUNCATED
}

// Tally counts what became of the arrivals of one put. Arrivals that are in no number belonged to a
// group that was dissolved.
type Tally struct {
	Accepted   int
	Duplicates int
	Failed     int
	Refused    []Refusal
	Dissolved  int
}

// Refusal is a trajectory that must not be trained on, although its sample is missing.
type Refusal struct {
	Reason  string
	Number  int // in the put, from 0
	Epoch   uint32
	Index   uint64
	Attempt uint32
	Sample  uint32
	Worker  string
}

func (r Refusal) String() string {
	return fmt.Sprintf("%s: sample %d of group %d/%d, attempt %d, by %s", r.Reason, r.Sample, r.Epoch, r.Index, r.Attempt,
		cmp.Or(r.Worker, "an unnamed worker"))
}

// Admit accepts, drops, or refuses the arrivals of some puts in order, and returns a tally for each
// put. All parts of a sample must be in one put, so that a sample has all of its parts or none: one
// whose put lacks some is refused.
func Admit(ctx context.Context, tx Tx, puts [][]Arrival) ([]Tally, error) {
	a := &admission{
		tx: tx, ledger: tx.Ledger(), have: map[uint64]map[uint32][]uint32{}, spreads: map[uint64]spread{}, stored: map[uint64]bool{},
		parts: map[sampleKey]uint32{}, fresh: map[uint64][]Sample{}, leftOut: map[uint64]map[uint32]bool{}, failed: map[uint64]bool{},
	}
	if err := a.load(ctx, puts); err != nil {
		return nil, err
	}
	tallies := make([]Tally, len(puts))
	for n, put := range puts {
		a.tally = &tallies[n]
		a.whole = whole(put)
		for i := range put {
			if err := a.decide(ctx, i, &put[i]); err != nil {
				return nil, err
			}
		}
	}
	if err := a.store(ctx); err != nil {
		return nil, err
	}
	return tallies, a.markUnused(ctx, puts)
}

// markUnused marks the payloads in the storage service whose arrivals were not accepted.
func (a *admission) markUnused(ctx context.Context, puts [][]Arrival) error {
	accepted := map[string]bool{}
	for _, samples := range a.fresh {
		for i := range samples {
			accepted[samples[i].Ref] = true
		}
	}
	var unused []string
	for _, put := range puts {
		for i := range put {
			if ref := put[i].Ref; ref != "" && !accepted[ref] {
				unused = append(unused, ref)
			}
		}
	}
	if len(unused) == 0 {
		return nil
	}
	return a.tx.MarkUnused(ctx, unused)
}

// admission is the state of one call of Admit.
type admission struct {
	tx      Tx
	ledger  *Ledger
	groups  map[uint64]*Group
	have    map[uint64]map[uint32][]uint32 // position -> sample -> parts
	spreads map[uint64]spread              // of the rewards, by position
	stored  map[uint64]bool                // positions with rows from earlier transactions
	weights digests
	fresh   map[uint64][]Sample                       // accepted by this call, by position
	leftOut map[uint64]map[uint32]bool                // position -> failed samples that are left out of the group
	failed  map[uint64]bool                           // positions that this call dissolved: all their failures are counted
	changed []uint64                                  // positions in the order in which they changed
	tally   *Tally                                    // of the current put
	whole   func(*trajectoryv1.TrajectoryHeader) bool // whether the current put has all parts of a sample
	parts   map[sampleKey]uint32                      // of the samples of several parts that this call has accepted
}

// sampleKey names a sample of an attempt.
type sampleKey struct {
	epoch           uint32
	index           uint64
	attempt, sample uint32
}

func keyOf(h *trajectoryv1.TrajectoryHeader) sampleKey {
	k := h.GetKey()
	return sampleKey{k.GetEpoch(), k.GetIndex(), k.GetAttempt(), k.GetSample()}
}

// partsOf is the number of parts of the sample that an arrival belongs to.
func partsOf(h *trajectoryv1.TrajectoryHeader) uint32 { return max(1, h.GetParts()) }

// whole returns whether a put has all parts of the sample of an arrival. Arrivals that were sampled
// twice may have another number of parts each time: only parts of the same number belong together.
func whole(put []Arrival) func(*trajectoryv1.TrajectoryHeader) bool {
	type version struct {
		sampleKey
		parts uint32
	}
	have := map[version]map[uint32]bool{}
	for i := range put {
		h := put[i].Header
		if partsOf(h) == 1 {
			continue
		}
		v := version{keyOf(h), partsOf(h)}
		if have[v] == nil {
			have[v] = map[uint32]bool{}
		}
		if h.GetKey().GetPart() < v.parts {
			have[v][h.GetKey().GetPart()] = true
		}
	}
	return func(h *trajectoryv1.TrajectoryHeader) bool {
		if h.GetKey().GetPart() >= partsOf(h) {
			return false
		}
		return partsOf(h) == 1 || len(have[version{keyOf(h), partsOf(h)}]) == int(partsOf(h))
	}
}

// load reads what the decisions need, in three queries.
func (a *admission) load(ctx context.Context, puts [][]Arrival) (err error) {
	var positions, open, versions []uint64
	for _, put := range puts {
		for i := range put {
			key := put[i].Header.GetKey()
			if p, err := a.ledger.position(key.GetEpoch(), key.GetIndex()); err == nil {
				positions = append(positions, p)
			}
			if r := put[i].Header.GetReceipt(); r != nil {
				versions = append(versions, r.GetVersion())
			}
		}
	}
	if a.groups, err = a.tx.Groups(ctx, distinct(positions)); err != nil {
		return err
	}
	for p, g := range a.groups {
		if g.State == Open && g.Samples > 0 {
			open = append(open, p)
		}
	}
	samples, err := a.tx.Samples(ctx, distinct(open))
	if err != nil {
		return err
	}
	for i := range samples {
		a.count(&samples[i])
		a.stored[samples[i].Position] = true
	}
	a.weights, err = readDigests(ctx, a.tx, versions)
	return err
}

// count adds a sample of a group to what the decisions are based on.
func (a *admission) count(s *Sample) {
	if a.have[s.Position] == nil {
		a.have[s.Position] = map[uint32][]uint32{}
	}
	a.have[s.Position][s.Sample] = append(a.have[s.Position][s.Sample], s.Part)
	a.spreads[s.Position] = a.spreads[s.Position].add(s)
	if !Trained(s.Outcome) {
		if a.leftOut[s.Position] == nil {
			a.leftOut[s.Position] = map[uint32]bool{}
		}
		a.leftOut[s.Position][s.Sample] = true
	}
}

// decide accepts, drops, or refuses one arrival.
func (a *admission) decide(ctx context.Context, number int, arrival *Arrival) error {
	h := arrival.Header
	key := h.GetKey()
	p, err := a.ledger.position(key.GetEpoch(), key.GetIndex())
	switch {
	case key.GetRunId() != a.ledger.Run, key.GetIndex() >= a.ledger.Config.GetRows(), key.GetSample() >= a.ledger.Config.GetGroupSize():
		a.refuse(ReasonBadKey, number, h)
		return nil
	case err != nil: // consumed before the snapshot that the run was restored from
		a.drop()
		return nil
	}
	g := a.groups[p]
	if g == nil {
		g = &Group{Position: p}
		a.groups[p] = g
	}
	if again := key.GetAttempt() > g.Attempt && (g.State == Open || g.State == Dissolved); g.State == 0 || again {
		if err := a.begin(ctx, g, key.GetAttempt()); err != nil {
			return err
		}
	}
	failed := h.GetOutcome() == trajectoryv1.Outcome_OUTCOME_INFRA_FAILED
	if g.State != Open || key.GetAttempt() < g.Attempt || a.known(p, h) {
		if failed && a.failed[p] && key.GetAttempt() == g.Attempt {
			a.ledger.fail(h.GetReason())
			a.tally.Failed++
			return nil
		}
		a.drop()
		return nil
	}
	switch h.GetOutcome() {
	case trajectoryv1.Outcome_OUTCOME_INFRA_FAILED:
		a.ledger.fail(h.GetReason())
		a.tally.Failed++
		if h.GetLeftOut() && a.spare(p, key.GetSample()) {
			break
		}
		a.failed[p] = true
		return a.dissolve(ctx, g, cmp.Or(h.GetReason(), ReasonUnknown))
	case trajectoryv1.Outcome_OUTCOME_ABORTED:
		return a.dissolve(ctx, g, cmp.Or(h.GetReason(), "ABORTED"))
	}
	if flaw := a.flaw(arrival); flaw != "" {
		a.refuse(flaw, number, h)
		return a.dissolve(ctx, g, flaw)
	}
	a.accept(g, arrival)
	return nil
}

// known reports whether an arrival is a duplicate: its sample has all of its parts, or the call has
// accepted this part or another number of parts.
func (a *admission) known(position uint64, h *trajectoryv1.TrajectoryHeader) bool {
	have := a.have[position][h.GetKey().GetSample()]
	return len(have) > 0 && (a.parts[keyOf(h)] != partsOf(h) || slices.Contains(have, h.GetKey().GetPart()))
}

// spare reports whether a group can have enough usable samples without this one.
func (a *admission) spare(position uint64, sample uint32) bool {
	without, least := len(a.leftOut[position]), a.ledger.Config.GetMinGroupSize()
	if !a.leftOut[position][sample] {
		without++
	}
	return least > 0 && uint64(without)+uint64(least) <= uint64(a.ledger.Config.GetGroupSize())
}

// flaw is the reason why a missing sample must not be trained on, or "".
func (a *admission) flaw(arrival *Arrival) string {
	h := arrival.Header
	switch {
	case arrival.Flaw != "":
		return arrival.Flaw
	case !a.whole(h):
		return ReasonPartsMissing
	case h.GetGroupSize() != a.ledger.Config.GetGroupSize():
		return ReasonGroupSize
	case !a.ledger.Config.GetReceipts():
		return ""
	case h.GetReceipt() == nil:
		return ReasonReceiptMissing
	case h.GetMinVersion() > h.GetMaxVersion(), h.GetReceipt().GetVersion() < h.GetMaxVersion():
		return ReasonReceiptMismatch
	}
	reason, _ := a.weights.flaw(h.GetReceipt().GetVersion(), h.GetReceipt().GetDigest())
	return reason
}

func (a *admission) accept(g *Group, arrival *Arrival) {
	h := arrival.Header
	s := Sample{
		Position: g.Position, Sample: h.GetKey().GetSample(), Part: h.GetKey().GetPart(), Attempt: g.Attempt,
		Segment: arrival.Segment, Offset: arrival.Offset, Length: arrival.Length, CRC: arrival.CRC, Ref: arrival.Ref,
		Reward: h.GetReward(), Outcome: h.GetOutcome(), MinVersion: h.GetMinVersion(), Times: timesOf(h),
	}
	if a.ledger.Config.GetReceipts() {
		s.ReceiptVersion = h.GetReceipt().GetVersion()
		if _, pending := a.weights.flaw(s.ReceiptVersion, h.GetReceipt().GetDigest()); pending {
			s.ReceiptDigest = h.GetReceipt().GetDigest()
			g.Pending++
		}
	}
	if len(a.have[g.Position]) == 0 || s.MinVersion < g.MinVersion {
		g.MinVersion = s.MinVersion
	}
	if a.have[g.Position][s.Sample] == nil {
		g.Samples++
	}
	if partsOf(h) > 1 {
		a.parts[keyOf(h)] = partsOf(h)
	}
	g.TokenRewards = g.TokenRewards || h.GetTokenRewards()
	a.count(&s)
	a.fresh[g.Position] = append(a.fresh[g.Position], s)
	a.changed = append(a.changed, g.Position)
	a.ledger.Samples++
	a.tally.Accepted++
}

// TimesBytes is the largest size of the times of a sample that are stored in its row.
const TimesBytes = 4096

// timesOf is the times of a sample as they are stored; nil if there are none or they are too large.
func timesOf(h *trajectoryv1.TrajectoryHeader) []byte {
	if h.GetTimes() == nil {
		return nil
	}
	raw, err := proto.Marshal(h.GetTimes())
	if err != nil || len(raw) > TimesBytes {
		return nil
	}
	return raw
}

// Failures are counted by at most failureReasons reasons, because producers choose them; the others
// are counted as otherReason.
const (
	failureReasons = 64
	otherReason    = "OTHER"
)

// fail counts a sample that failed because of infrastructure.
func (l *Ledger) fail(reason string) {
	l.InfraFailed++
	reason = cmp.Or(reason, ReasonUnknown)
	if _, known := l.Failures[reason]; !known && len(l.Failures) >= failureReasons {
		reason = otherReason
	}
	if l.Failures == nil {
		l.Failures = map[string]uint64{}
	}
	l.Failures[reason]++
}

func (a *admission) drop() {
	a.ledger.Duplicates++
	a.tally.Duplicates++
}

func (a *admission) refuse(reason string, number int, h *trajectoryv1.TrajectoryHeader) {
	a.ledger.Refused++
	k := h.GetKey()
	a.tally.Refused = append(a.tally.Refused, Refusal{Reason: reason, Number: number, Epoch: k.GetEpoch(), Index: k.GetIndex(), Attempt: k.GetAttempt(),
		Sample: k.GetSample(), Worker: h.GetWorkerId()})
}

// store completes groups and writes everything.
func (a *admission) store(ctx context.Context) error {
	var groups []*Group
	var samples []Sample
	for _, p := range unique(a.changed) {
		g := a.groups[p]
		if err := a.ledger.complete(g, a.spreads[p]); err != nil {
			return err
		}
		groups = append(groups, g)
		samples = append(samples, a.fresh[p]...)
	}
	if err := a.tx.PutGroups(ctx, groups); err != nil {
		return err
	}
	return a.tx.AddSamples(ctx, samples)
}

// complete moves an open group to READY once all of its samples are there and verified, or excludes
// it if dynamic sampling is on and its rewards are all equal.
func (l *Ledger) complete(g *Group, rewards spread) error {
	if g.State != Open || g.Pending > 0 || g.Samples < l.Config.GetGroupSize() {
		return nil
	}
	if l.dynamic() && rewards.equal() && !g.TokenRewards {
		return l.move(g, Excluded, ReasonZeroAdvantage)
	}
	return l.move(g, Ready, "")
}

// begin opens a new attempt.
func (a *admission) begin(ctx context.Context, g *Group, attempt uint32) error {
	if err := a.forget(ctx, g); err != nil {
		return err
	}
	g.Attempt = attempt
	a.changed = append(a.changed, g.Position)
	return a.ledger.move(g, Open, "")
}

// dissolve ends the attempt of a group without a result.
func (a *admission) dissolve(ctx context.Context, g *Group, reason string) error {
	if err := a.forget(ctx, g); err != nil {
		return err
	}
	if reason != ReasonOldLineage { // no worker is to blame
		g.Failures++
	}
	a.tally.Dissolved++
	a.changed = append(a.changed, g.Position)
	return a.ledger.move(g, Dissolved, reason)
}

// forget drops the samples of the current attempt.
func (a *admission) forget(ctx context.Context, g *Group) error {
	stored := a.stored[g.Position]
	delete(a.stored, g.Position)
	delete(a.have, g.Position)
	delete(a.spreads, g.Position)
	delete(a.leftOut, g.Position)
	delete(a.fresh, g.Position)
	if !stored {
		return nil
	}
	return a.tx.DropSamples(ctx, g.Position)
}
