package ledger

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/wait"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// Readiness tells whether a step can be leased.
type Readiness struct {
	Step  *Step          // the step, if it is leased or committed already
	Due   bool           // Lease would lease the step, or dissolve stale groups
	Waits []*waitv1.Wait // otherwise: what the step waits for
}

// CheckReadiness looks at the groups of a step without changing anything: most calls find that
// something is missing, and need no write transaction. ErrOrder, ErrExhausted.
func CheckReadiness(ctx context.Context, r Reader, step uint64) (Readiness, error) {
	l := r.Ledger()
	s, err := selectGroups(ctx, r, step)
	if err != nil {
		return Readiness{}, err
	}
	if s.known != nil {
		return Readiness{Step: s.known}, nil
	}
	if l.Groups[Dissolved] > 0 {
		dissolved, err := r.ListGroups(ctx, GroupQuery{States: []State{Dissolved}, Limit: 1})
		if err != nil {
			return Readiness{}, err
		}
		if len(dissolved) > 0 {
			s.example = dissolved[0]
		}
	}
	return Readiness{Due: s.full(l) || len(s.stale) > 0, Waits: s.waits(l, step)}, s.check(l, step)
}

// LeaseResult is the batch of a step, or what it waits for.
type LeaseResult struct {
	Step    *Step // nil: not leased
	Samples []Sample
	Waits   []*waitv1.Wait // what a step without a batch waits for
}

// Lease takes the groups of a step. If some are stale it dissolves them instead, and the step has
// no batch yet. ErrOrder, ErrExhausted.
func Lease(ctx context.Context, tx Tx, step uint64) (LeaseResult, error) {
	l := tx.Ledger()
	s, err := selectGroups(ctx, tx, step)
	if err != nil {
		return LeaseResult{}, err
	}
	if s.known != nil { // another call was first
		samples, err := tx.BatchSamples(ctx, step)
		return LeaseResult{Step: s.known, Samples: samples}, err
	}
	for _, g := range s.stale {
		if err := tx.DropSamples(ctx, g.Position); err != nil {
			return LeaseResult{}, err
		}
		if err := l.move(g, Dissolved, ReasonStale); err != nil {
			return LeaseResult{}, err
		}
	}
	if !s.full(l) {
		return LeaseResult{Waits: s.waits(l, step)}, tx.PutGroups(ctx, s.stale)
	}
	if err := s.check(l, step); err != nil {
		return LeaseResult{}, err
	}
	zero, mean, err := zeroAdvantage(ctx, tx, s.skip)
	if err != nil {
		return LeaseResult{}, err
	}
	positions := make([]uint64, len(s.take))
	for i, g := range s.take {
		positions[i] = g.Position
	}
	samples, err := tx.Samples(ctx, distinct(positions))
	if err != nil {
		return LeaseResult{}, err
	}
	for _, g := range s.take {
		if err := l.move(g, Leased, ""); err != nil {
			return LeaseResult{}, err
		}
		g.Step = step
	}
	for _, g := range s.skip {
		g.Step = step
	}
	l.Skipped += uint64(len(s.skip))
	if err := tx.PutGroups(ctx, slices.Concat(s.stale, s.take, s.skip)); err != nil {
		return LeaseResult{}, err
	}
	leased := &Step{
		Step: step, Batch: batchID(l, samples), Groups: uint32(len(s.take)), Samples: uint32(len(samples)), Excluded: uint32(len(s.skip)),
		Zero: zero, ZeroReward: mean, End: l.end(step),
	}
	return LeaseResult{Step: leased, Samples: samples}, tx.PutStep(ctx, leased)
}

// MayLease reports whether a change of the ledger can give a step its batch, or make a group stale.
// A ledger changes with every put, and CheckReadiness costs more than a small put.
func MayLease(c *bufferv1.LedgerConfig, step uint64, last, now *bufferv1.LedgerState) bool {
	switch {
	case now.GetLeased() > 0, now.GetStep() >= step:
		return true
	case now.GetReady()+now.GetExcluded()-now.GetSkipped() >= uint64(c.GetGroupsPerStep()):
		return true
	}
	return c.GetReceipts() && now.GetReady() > last.GetReady()
}

// selection is what a lease would take now.
type selection struct {
	take      []*Group // ready groups
	skip      []*Group // excluded groups that count for the step
	stale     []*Group // ready groups that must be dissolved first
	missing   map[State]int
	example   *Group // a dissolved group, for the message
	pending   int    // open groups that only wait for a digest
	exhausted bool   // every group that the step may use is complete or excluded
	known     *Step  // the step is leased or committed
}

// selectGroups finds the groups of a step. ErrOrder.
func selectGroups(ctx context.Context, r Reader, step uint64) (*selection, error) {
	l := r.Ledger()
	known, err := r.Step(ctx, step)
	if err != nil || known != nil {
		return &selection{known: known}, err
	}
	if step != l.Step+1 {
		return nil, ErrOrder.With("step", fmt.Sprint(step)).With("committed", fmt.Sprint(l.Step))
	}
	if l.dynamic() {
		return selectDynamic(ctx, r, step)
	}
	var groups []*Group
	if l.Config.GetOrder() == bufferv1.LeaseOrder_LEASE_ORDER_POSITION {
		from, to := l.window(step)
		groups, err = r.ListGroups(ctx, GroupQuery{From: from, To: to})
	} else {
		groups, err = r.Arrived(ctx, int(l.Config.GetGroupsPerStep()))
	}
	if err != nil {
		return nil, err
	}
	s := &selection{missing: map[State]int{}}
	for _, g := range groups {
		s.add(l, g, step)
	}
	return s, nil
}

// add puts a group of the step where it belongs.
func (d *selection) add(l *Ledger, g *Group, step uint64) {
	switch {
	case g.State == Excluded:
		d.skip = append(d.skip, g)
	case g.State == Ready && l.stale(g, step):
		d.stale = append(d.stale, g)
	case g.State == Ready:
		d.take = append(d.take, g)
	case g.State == Open && g.Pending > 0 && g.Samples == l.Config.GetGroupSize():
		d.pending++
	default:
		d.missing[g.State]++
	}
}

// full reports whether the step has its groups.
func (d *selection) full(l *Ledger) bool {
	want := int(l.Config.GetGroupsPerStep())
	if l.dynamic() {
		return len(d.take) == want || d.exhausted
	}
	return len(d.take)+len(d.skip) == want
}

// stale reports whether the step would train on tokens of weights that are too old. Step s trains
// version s-1.
func (l *Ledger) stale(g *Group, step uint64) bool {
	return l.Config.GetReceipts() && g.MinVersion+uint64(l.Config.GetMaxStaleness()) < step-1
}

// waits lists what a lease waits for.
func (d *selection) waits(l *Ledger, step uint64) (waits []*waitv1.Wait) {
	want := int(l.Config.GetGroupsPerStep())
	dissolved := d.missing[Dissolved] + len(d.stale)
	byPosition := l.Config.GetOrder() == bufferv1.LeaseOrder_LEASE_ORDER_POSITION
	if !byPosition {
		dissolved = int(l.Groups[Dissolved])
	}
	sampling := want - len(d.take) - d.pending
	if !l.dynamic() {
		sampling -= len(d.skip)
	}
	if byPosition {
		sampling -= dissolved
	}
	add := func(owner, reason string, groups int, format string, args ...any) {
		waits = append(waits, &waitv1.Wait{Owner: owner, Reason: reason, Groups: uint32(groups), Evidence: fmt.Sprintf(format, args...)})
	}
	if sampling > 0 {
		owner, by := wait.Worker, "inference workers"
		switch {
		case !l.Config.GetReceipts(): // no weights sampled them
			owner, by = wait.Producers, "workers that read rows, or external producers"
		case l.Config.GetExternal():
			owner, by = wait.Agents, "agents"
		}
		add(owner, wait.GroupsMissing, sampling, "%d of %d groups of step %d (%s)%s", sampling, want, step, by, d.excludedSoFar(l))
	}
	if equal := d.equal(); l.dynamic() && equal >= want {
		add("reward", wait.EqualRewards, 0, "groups whose rewards differ: in %d of the %d groups drawn for step %d all rewards were equal (dynamic sampling, which may draw %d)",
			equal, len(d.take)+len(d.skip), step, l.drawLimit())
		waits[len(waits)-1].Fix = "check with `rollout infer batch` that the reward tells answers apart, choose rows that the policy solves sometimes, " +
			"raise `sampling.group_size`, or lower `sampling.refill_rounds`"
	}
	if dissolved > 0 {
		add("scheduler", wait.NextAttempt, dissolved, "the next attempt of %d dissolved groups (scheduler)%s", dissolved, d.describeExample(l))
	}
	if d.pending > 0 {
		add("learner-controller", wait.WeightsNotRecorded, d.pending, "the digest of the weights that sampled %d groups (learner-controller)", d.pending)
	}
	if l.Closed {
		add("scheduler", wait.LedgerClosed, 0, "the ledger to be opened again: ingest is stopped (scheduler)")
	}
	return waits
}

// describeExample names a dissolved group: an external producer puts it again with the next
// attempt.
func (d *selection) describeExample(l *Ledger) string {
	if d.example == nil {
		return ""
	}
	key := l.groupKey(d.example)
	return fmt.Sprintf(", such as group %d/%d after attempt %d: %s", key.GetEpoch(), key.GetIndex(), key.GetAttempt(), cmp.Or(d.example.Reason, "dissolved"))
}

// batchID is blake3 over "rollout.batch.v1" and, for each sample in the order of the batch, its
// epoch, index, attempt, sample, part, and CRC-32C as 8-byte little-endian integers.
func batchID(l *Ledger, samples []Sample) string {
	h := id.NewHasher()
	_, _ = h.Write([]byte("rollout.batch.v1")) // a hasher never fails
	rows := l.Config.GetRows()
	buf := make([]byte, 0, 48*len(samples))
	for i := range samples {
		s := &samples[i]
		for _, n := range [6]uint64{s.Position / rows, s.Position % rows, uint64(s.Attempt), uint64(s.Sample), uint64(s.Part), uint64(s.CRC)} {
			buf = binary.LittleEndian.AppendUint64(buf, n)
		}
	}
	_, _ = h.Write(buf)
	return h.ID()
}
