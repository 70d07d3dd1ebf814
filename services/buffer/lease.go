package buffer

import (
	"context"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/rollout-rl/rollout/libs/id"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// draw is what a lease would take now.
type draw struct {
	take    []*Group // ready ones
	skip    []*Group // excluded ones that count for the step
	stale   []*Group // ready ones that must be dissolved first
	missing map[State]int
	lost    *Group // a dissolved one, as an example
	pending int    // open ones that wait for a digest alone
	drawn   bool   // every group that the step may go through is settled
	known   *Step
	samples []Sample // of the batch, once it is leased
}

func (d *draw) full(l *Ledger) bool {
	want := int(l.Config.GetGroupsPerStep())
	if l.draws() {
		return len(d.take) == want || d.drawn
	}
	return len(d.take)+len(d.skip) == want
}

// look finds the groups of a step. ErrOrder.
func look(ctx context.Context, r Reader, step uint64) (*draw, error) {
	l := r.Ledger()
	known, err := r.Step(ctx, step)
	if err != nil || known != nil {
		return &draw{known: known}, err
	}
	if step != l.Step+1 {
		return nil, ErrOrder.With("step", fmt.Sprint(step)).With("committed", fmt.Sprint(l.Step))
	}
	if l.draws() {
		return lookAhead(ctx, r, step)
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
	d := &draw{missing: map[State]int{}}
	for _, g := range groups {
		d.sort(l, g, step)
	}
	return d, nil
}

// sort takes a group of the step to those like it.
func (d *draw) sort(l *Ledger, g *Group, step uint64) {
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

// stale reports whether the step would train on tokens of weights that are too old. Step s trains version s-1.
func (l *Ledger) stale(g *Group, step uint64) bool {
	return l.Config.GetReceipts() && g.MinVersion+uint64(l.Config.GetMaxStaleness()) < step-1
}

// waiting says what a lease waits for and who owns that.
func (d *draw) waiting(l *Ledger, step uint64) string {
	want := int(l.Config.GetGroupsPerStep())
	dissolved := d.missing[Dissolved] + len(d.stale)
	byPosition := l.Config.GetOrder() == bufferv1.LeaseOrder_LEASE_ORDER_POSITION
	if !byPosition {
		dissolved = int(l.Groups[Dissolved])
	}
	sampling := want - len(d.take) - d.pending
	if !l.draws() {
		sampling -= len(d.skip)
	}
	if byPosition {
		sampling -= dissolved
	}
	var parts []string
	if sampling > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d groups of step %d (inference workers)%s", sampling, want, step, d.inPlace(l)))
	}
	if dissolved > 0 {
		parts = append(parts, fmt.Sprintf("the next attempt of %d dissolved groups (scheduler)%s", dissolved, d.example(l)))
	}
	if d.pending > 0 {
		parts = append(parts, fmt.Sprintf("the digest of the weights that sampled %d groups (learner-controller)", d.pending))
	}
	if l.Closed {
		parts = append(parts, "the ledger to be opened again: ingest is stopped (scheduler)")
	}
	return strings.Join(parts, "; ")
}

// example names a dissolved group: a producer of one's own puts it again, as the attempt after that.
func (d *draw) example(l *Ledger) string {
	if d.lost == nil {
		return ""
	}
	key := l.key(d.lost)
	return fmt.Sprintf(", such as group %d/%d after attempt %d: %s", key.GetEpoch(), key.GetIndex(), key.GetAttempt(), or(d.lost.Reason, "dissolved"))
}

// lease takes the groups of a step, or dissolves the stale ones. It reports whether the step has a batch now.
func lease(ctx context.Context, tx Tx, step uint64) (leased bool, d *draw, err error) {
	l := tx.Ledger()
	if d, err = look(ctx, tx, step); err != nil {
		return false, nil, err
	}
	if d.known != nil { // another call was first
		d.samples, err = tx.BatchSamples(ctx, step)
		return true, d, err
	}
	for _, g := range d.stale {
		if err := tx.DropSamples(ctx, g.Position); err != nil {
			return false, d, err
		}
		if err := l.move(g, Dissolved, ReasonStale); err != nil {
			return false, d, err
		}
	}
	if !d.full(l) {
		return false, d, tx.PutGroups(ctx, d.stale)
	}
	if err := d.enough(l, step); err != nil {
		return false, d, err
	}
	zero, mean, err := without(ctx, tx, d.skip)
	if err != nil {
		return false, d, err
	}
	positions := make([]uint64, len(d.take))
	for i, g := range d.take {
		positions[i] = g.Position
	}
	samples, err := tx.Samples(ctx, distinct(positions))
	if err != nil {
		return false, d, err
	}
	for _, g := range d.take {
		if err := l.move(g, Leased, ""); err != nil {
			return false, d, err
		}
		g.Step = step
	}
	for _, g := range d.skip {
		g.Step = step
	}
	l.Skipped += uint64(len(d.skip))
	if err := tx.PutGroups(ctx, append(d.take, d.skip...)); err != nil {
		return false, d, err
	}
	d.samples = samples
	d.known = &Step{
		Step: step, Batch: batchID(l, samples), Groups: uint32(len(d.take)), Samples: uint32(len(samples)), Excluded: uint32(len(d.skip)),
		Zero: zero, ZeroReward: mean, End: l.end(step),
	}
	return true, d, tx.PutStep(ctx, d.known)
}

// batchID is blake3 over "rollout.batch.v1" and of each sample epoch, index, attempt, sample, part and CRC-32C as 8-byte
// little-endian integers, in the batch's order.
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
