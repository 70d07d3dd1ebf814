package buffer

import (
	"context"
	"slices"

	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// Reasons of refusals and dissolutions that the ledger itself gives.
const (
	ReasonBadKey          = "BAD_KEY"
	ReasonGroupSize       = "GROUP_SIZE_MISMATCH"
	ReasonReceiptMissing  = "RECEIPT_MISSING"
	ReasonReceiptMismatch = "RECEIPT_MISMATCH"
	ReasonPayloadMissing  = "PAYLOAD_MISSING"
	ReasonPayloadCorrupt  = "PAYLOAD_CORRUPT"
	ReasonStale           = "STALE"
	ReasonZeroAdvantage   = "ZERO_ADVANTAGE" // all rewards of the group are equal
)

// admission decides about arrivals within one transaction.
type admission struct {
	tx      Tx
	ledger  *Ledger
	groups  map[uint64]*Group
	have    map[uint64]map[uint32][]uint32 // position -> sample -> parts
	spreads map[uint64]spread              // of the rewards there, by position
	stored  map[uint64]bool                // positions that have rows from before
	weights map[uint64]string
	fresh   map[uint64][]Sample // accepted now, by position
	failed  map[uint64]bool     // positions that this call dissolved: all their failures are counted
	touched []uint64            // positions in the order they changed
	place   int                 // in the put
	tally   Tally               // of the put
}

// admit accepts, drops or refuses the arrivals of some loads in order, and fills in their tallies. Parts of a sample arrive together,
// in one put. It returns all refusals.
func admit(ctx context.Context, tx Tx, loads []*load) (refused []Refusal, err error) {
	a := &admission{
		tx: tx, ledger: tx.Ledger(), have: map[uint64]map[uint32][]uint32{}, spreads: map[uint64]spread{}, stored: map[uint64]bool{},
		fresh: map[uint64][]Sample{}, failed: map[uint64]bool{},
	}
	if err := a.load(ctx, loads); err != nil {
		return nil, err
	}
	for _, l := range loads {
		a.ledger.Refused += uint64(l.malformed)
		l.tallies = make([]Tally, len(l.puts))
		for n, put := range l.puts {
			a.tally = Tally{}
			for i := range put {
				a.place = i
				if err := a.decide(ctx, &put[i]); err != nil {
					return nil, err
				}
			}
			l.tallies[n] = a.tally
			refused = append(refused, a.tally.Refused...)
		}
	}
	return refused, a.store(ctx)
}

// load reads what the decisions need, in three queries.
func (a *admission) load(ctx context.Context, loads []*load) (err error) {
	var positions, open, versions []uint64
	for _, l := range loads {
		l.find(func(arrival *Arrival) bool {
			key := arrival.Header.GetKey()
			if p, err := a.ledger.position(key.GetEpoch(), key.GetIndex()); err == nil {
				positions = append(positions, p)
			}
			if r := arrival.Header.GetReceipt(); r != nil {
				versions = append(versions, r.GetVersion())
			}
			return false
		})
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
		a.note(&samples[i])
		a.stored[samples[i].Position] = true
	}
	if len(versions) > 0 {
		a.weights, err = a.tx.Weights(ctx, distinct(versions))
	}
	return err
}

func (a *admission) note(s *Sample) {
	if a.have[s.Position] == nil {
		a.have[s.Position] = map[uint32][]uint32{}
	}
	a.have[s.Position][s.Sample] = append(a.have[s.Position][s.Sample], s.Part)
	a.spreads[s.Position] = a.spreads[s.Position].with(s.Reward)
}

// decide takes one arrival.
func (a *admission) decide(ctx context.Context, arrival *Arrival) error {
	h := arrival.Header
	key := h.GetKey()
	p, err := a.ledger.position(key.GetEpoch(), key.GetIndex())
	switch {
	case key.GetRunId() != a.ledger.Run, key.GetIndex() >= a.ledger.Config.GetRows(), key.GetSample() >= a.ledger.Config.GetGroupSize():
		a.refuse(ReasonBadKey, h)
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
	if g.State != Open || key.GetAttempt() < g.Attempt || slices.Contains(a.have[p][key.GetSample()], key.GetPart()) {
		if failed && a.failed[p] && key.GetAttempt() == g.Attempt {
			a.ledger.InfraFailed++
			a.tally.Failed++
			return nil
		}
		a.drop()
		return nil
	}
	switch h.GetOutcome() {
	case trajectoryv1.Outcome_OUTCOME_INFRA_FAILED:
		a.ledger.InfraFailed++
		a.tally.Failed++
		a.failed[p] = true
		return a.dissolve(ctx, g, or(h.GetReason(), "INFRA_FAILED"))
	case trajectoryv1.Outcome_OUTCOME_ABORTED:
		return a.dissolve(ctx, g, or(h.GetReason(), "ABORTED"))
	}
	if flaw := a.flaw(arrival); flaw != "" {
		a.refuse(flaw, h)
		return a.dissolve(ctx, g, flaw)
	}
	a.accept(g, arrival)
	return nil
}

// flaw says why a wanted trajectory must not be trained on.
func (a *admission) flaw(arrival *Arrival) string {
	h := arrival.Header
	switch {
	case arrival.Flaw != "":
		return arrival.Flaw
	case h.GetGroupSize() != a.ledger.Config.GetGroupSize():
		return ReasonGroupSize
	case !a.ledger.Config.GetReceipts():
		return ""
	case h.GetReceipt() == nil:
		return ReasonReceiptMissing
	case h.GetMinVersion() > h.GetMaxVersion(), h.GetReceipt().GetVersion() < h.GetMaxVersion():
		return ReasonReceiptMismatch
	}
	if digest, known := a.weights[h.GetReceipt().GetVersion()]; known && digest != h.GetReceipt().GetDigest() {
		return ReasonReceiptMismatch
	}
	return ""
}

func (a *admission) accept(g *Group, arrival *Arrival) {
	h := arrival.Header
	s := Sample{
		Position: g.Position, Sample: h.GetKey().GetSample(), Part: h.GetKey().GetPart(), Attempt: g.Attempt,
		Segment: arrival.Place.Segment, Offset: arrival.Place.Offset, Length: arrival.Place.Length, CRC: arrival.CRC, Ref: arrival.Ref,
		Reward: h.GetReward(), Outcome: h.GetOutcome(), MinVersion: h.GetMinVersion(),
	}
	if a.ledger.Config.GetReceipts() {
		s.ReceiptVersion = h.GetReceipt().GetVersion()
		if _, known := a.weights[s.ReceiptVersion]; !known {
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
	g.TokenRewards = g.TokenRewards || h.GetTokenRewards()
	a.note(&s)
	a.fresh[g.Position] = append(a.fresh[g.Position], s)
	a.touched = append(a.touched, g.Position)
	a.ledger.Samples++
	a.tally.Accepted++
}

func (a *admission) drop() {
	a.ledger.Duplicates++
	a.tally.Duplicates++
}

func (a *admission) refuse(reason string, h *trajectoryv1.TrajectoryHeader) {
	a.ledger.Refused++
	k := h.GetKey()
	a.tally.Refused = append(a.tally.Refused, Refusal{Reason: reason, Place: a.place, Epoch: k.GetEpoch(), Index: k.GetIndex(), Attempt: k.GetAttempt(),
		Sample: k.GetSample(), Worker: h.GetWorkerId()})
}

// store completes groups and writes everything.
func (a *admission) store(ctx context.Context) error {
	var groups []*Group
	var samples []Sample
	for _, p := range unique(a.touched) {
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

// complete makes an open group ready once all of its samples are there and agree with the record, or leaves it out where a step
// could learn nothing of rewards like these.
func (l *Ledger) complete(g *Group, rewards spread) error {
	if g.State != Open || g.Pending > 0 || g.Samples < l.Config.GetGroupSize() {
		return nil
	}
	if l.draws() && rewards.equal() && !g.TokenRewards {
		return l.move(g, Excluded, ReasonZeroAdvantage)
	}
	return l.move(g, Ready, "")
}

func distinct(numbers []uint64) []uint64 {
	slices.Sort(numbers)
	return slices.Compact(numbers)
}

// unique keeps the first of each number.
func unique(numbers []uint64) []uint64 {
	seen := make(map[uint64]bool, len(numbers))
	return slices.DeleteFunc(numbers, func(n uint64) bool {
		was := seen[n]
		seen[n] = true
		return was
	})
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}
