// Package storetest is the conformance suite of ledger.Store.
package storetest

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

const run = "run-01jz0000000000000000000000"

func config() *bufferv1.LedgerConfig {
	return &bufferv1.LedgerConfig{GroupsPerStep: 2, GroupSize: 2, Order: bufferv1.LeaseOrder_LEASE_ORDER_POSITION, Rows: 100, FirstStep: 4}
}

// Run tests the stores that open returns: an empty one for a new folder, the same one again for a
// known folder. The suite closes nothing; open registers cleanup.
func Run(t *testing.T, open func(t *testing.T, folder string) ledger.Store) {
	for name, test := range map[string]func(*testing.T, *bundle){
		"Create":                createTwice,
		"UnknownRun":            unknownRun,
		"UpdateIsAllOrNothing":  allOrNothing,
		"UpdatesTakeTurns":      takeTurns,
		"ViewSeesOneMoment":     oneMoment,
		"Groups":                groups,
		"TextsWithNUL":          texts,
		"Samples":               samples,
		"PendingUntilVerified":  pending,
		"Steps":                 steps,
		"TakeGroups":            takeGroups,
		"Weights":               weights,
		"UncoveredSegments":     uncovered,
		"RunsAreApart":          apart,
		"EverythingIsThereThen": reopen,
		"UnusedPayloads":        unused,
		"DeleteLeavesNothing":   deleted,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &bundle{T: t, folder: t.TempDir(), open: open}
			b.store = open(t, b.folder)
			b.create(run)
			test(t, b)
		})
	}
}

type bundle struct {
	*testing.T
	folder string
	open   func(*testing.T, string) ledger.Store
	store  ledger.Store
}

func (b *bundle) create(run string) {
	b.Helper()
	if err := b.store.Create(b.Context(), run, config(), nil); err != nil {
		b.Fatal(err)
	}
}

func (b *bundle) update(fn func(tx ledger.Tx) error) {
	b.Helper()
	if err := b.store.Update(b.Context(), run, fn); err != nil {
		b.Fatal(err)
	}
}

func (b *bundle) view(fn func(r ledger.Reader) error) {
	b.Helper()
	if err := b.store.View(b.Context(), run, fn); err != nil {
		b.Fatal(err)
	}
}

func (b *bundle) ledger() (l ledger.Ledger) {
	b.Helper()
	b.view(func(r ledger.Reader) error { l = *r.Ledger(); return nil })
	return l
}

func equal(t *testing.T, what string, got, want any) {
	t.Helper()
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

func createTwice(t *testing.T, b *bundle) {
	other := config()
	other.GroupSize = 9
	if err := b.store.Create(t.Context(), run, other, nil); err != nil {
		t.Fatal(err)
	}
	l := b.ledger()
	equal(t, "ledger", l, ledger.Ledger{Run: run, Config: config(), Step: 4})
	runs, err := b.store.Runs(t.Context())
	if err != nil || !slices.Equal(runs, []string{run}) {
		t.Errorf("%v %v", runs, err)
	}
	b.update(func(tx ledger.Tx) error { tx.Ledger().Closed = true; return nil })
	if l = b.ledger(); !l.Closed {
		t.Errorf("ledger %+v", l)
	}
	if runs, err = b.store.Runs(t.Context()); err != nil || len(runs) > 0 {
		t.Errorf("a closed ledger is listed: %v %v", runs, err)
	}
	seeded := config()
	seeded.Seed = &bufferv1.LedgerSeed{Rows: "a", Payloads: "b"}
	if err := b.store.Create(t.Context(), "run-seeded", seeded, nil); err != nil {
		t.Fatal(err)
	}
	if runs, err = b.store.Runs(t.Context()); err != nil || len(runs) > 0 {
		t.Errorf("a ledger without the groups that it begins with is open: %v %v", runs, err)
	}
}

func unknownRun(t *testing.T, b *bundle) {
	if err := b.store.View(t.Context(), "run-x", func(ledger.Reader) error { return nil }); !errors.Is(err, ledger.ErrNoLedger) {
		t.Errorf("view: %v", err)
	}
	if err := b.store.Update(t.Context(), "run-x", func(ledger.Tx) error { return nil }); !errors.Is(err, ledger.ErrNoLedger) {
		t.Errorf("update: %v", err)
	}
}

func allOrNothing(t *testing.T, b *bundle) {
	boom := errors.New("boom")
	err := b.store.Update(t.Context(), run, func(tx ledger.Tx) error {
		tx.Ledger().Samples = 7
		return errors.Join(tx.PutGroups(t.Context(), []*ledger.Group{{Position: 1, State: ledger.Open}}), tx.PutWeights(t.Context(), ledger.Weights{Version: 1, Digest: "d"}), boom)
	})
	if !errors.Is(err, boom) {
		t.Fatalf("got %v", err)
	}
	b.view(func(r ledger.Reader) error {
		g, err := r.Groups(t.Context(), []uint64{1})
		w, err2 := r.Weights(t.Context(), []uint64{1})
		if len(g)+len(w) > 0 || r.Ledger().Samples > 0 || r.Ledger().Revision > 0 {
			t.Errorf("left: %v %v %+v", g, w, r.Ledger())
		}
		return errors.Join(err, err2)
	})
}

func takeTurns(t *testing.T, b *bundle) {
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			err := b.store.Update(t.Context(), run, func(tx ledger.Tx) error { tx.Ledger().Samples++; return nil })
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if l := b.ledger(); l.Samples != 20 || l.Revision != 20 {
		t.Errorf("%d samples, revision %d", l.Samples, l.Revision)
	}
}

func oneMoment(t *testing.T, b *bundle) {
	b.view(func(r ledger.Reader) error {
		b.update(func(tx ledger.Tx) error {
			return tx.PutGroups(t.Context(), []*ledger.Group{{Position: 1, State: ledger.Open}})
		})
		g, err := r.Groups(t.Context(), []uint64{1})
		if len(g) > 0 || r.Ledger().Revision != 0 {
			t.Errorf("the view changed: %v", g)
		}
		return err
	})
}

// texts come from producers, and none may make the transaction of the others fail.
func texts(t *testing.T, b *bundle) {
	b.update(func(tx ledger.Tx) error {
		return errors.Join(tx.PutGroups(t.Context(), []*ledger.Group{{Position: 3, State: ledger.Dissolved, Reason: "A\x00B"}}),
			tx.AddSamples(t.Context(), []ledger.Sample{{Position: 3, Ref: "x\x00", ReceiptDigest: "\x00"}}))
	})
	b.view(func(r ledger.Reader) error {
		got, err := r.Groups(t.Context(), []uint64{3})
		equal(t, "groups", got, map[uint64]*ledger.Group{3: {Position: 3, State: ledger.Dissolved, Reason: "A\uFFFDB"}})
		return err
	})
}

func groups(t *testing.T, b *bundle) {
	first := &ledger.Group{Position: 3, Attempt: 2, State: ledger.Dissolved, Reason: "STALE", Failures: 1}
	second := &ledger.Group{Position: 1, State: ledger.Ready, Samples: 2, Pending: 1, MinVersion: 5, Arrival: 2, TokenRewards: true}
	third := &ledger.Group{Position: 9, State: ledger.Excluded, Reason: "x", Arrival: 1}
	taken := &ledger.Group{Position: 2, State: ledger.Leased, Step: 5, Arrival: 3}
	b.update(func(tx ledger.Tx) error {
		return tx.PutGroups(t.Context(), []*ledger.Group{first, second, third, taken, {Position: 4, State: ledger.Open}})
	})
	b.update(func(tx ledger.Tx) error {
		return tx.PutGroups(t.Context(), []*ledger.Group{{Position: 4, State: ledger.Open, Samples: 1}})
	})
	open := &ledger.Group{Position: 4, State: ledger.Open, Samples: 1}
	b.view(func(r ledger.Reader) error {
		byPosition, err := r.Groups(t.Context(), []uint64{1, 3, 77})
		equal(t, "groups", byPosition, map[uint64]*ledger.Group{1: second, 3: first})
		var errs []error
		for _, c := range []struct {
			q    ledger.GroupQuery
			want []*ledger.Group
		}{
			{ledger.GroupQuery{}, []*ledger.Group{second, taken, first, open, third}},
			{ledger.GroupQuery{From: 2, To: 4}, []*ledger.Group{taken, first}},
			{ledger.GroupQuery{Limit: 2}, []*ledger.Group{second, taken}},
			{ledger.GroupQuery{States: []ledger.State{ledger.Dissolved}}, []*ledger.Group{first}},
			{ledger.GroupQuery{States: []ledger.State{ledger.Open, ledger.Excluded}, From: 4}, []*ledger.Group{open, third}},
		} {
			got, err := r.ListGroups(t.Context(), c.q)
			equal(t, "list", got, c.want)
			errs = append(errs, err)
		}
		for _, c := range []struct{ from, end, want uint64 }{{0, 10, 5}, {2, 4, 2}, {4, 4, 0}, {5, 9, 0}} {
			n, err := r.Count(t.Context(), c.from, c.end)
			equal(t, "count", n, c.want)
			errs = append(errs, err)
		}
		end, errEnd := r.End(t.Context())
		equal(t, "end", end, uint64(10))
		errs = append(errs, errEnd)
		arrived, err2 := r.Arrived(t.Context(), 10)
		equal(t, "arrived", arrived, []*ledger.Group{third, second})
		one, err3 := r.Arrived(t.Context(), 1)
		equal(t, "first arrived", one, []*ledger.Group{third})
		return errors.Join(append(errs, err, err2, err3)...)
	})
}

func sample(position uint64, n, part uint32) ledger.Sample {
	return ledger.Sample{Position: position, Sample: n, Part: part, Attempt: 1, Segment: 1, Offset: 1 << 40, Length: 10, CRC: 0xffffffff,
		Reward: 0.1, Outcome: trajectoryv1.Outcome_OUTCOME_TRUNCATED, MinVersion: 3, ReceiptVersion: 4}
}

func samples(t *testing.T, b *bundle) {
	byRef := sample(7, 0, 0)
	byRef.Segment, byRef.Ref, byRef.Times = 0, "blake3-x", []byte{0, 1, 255}
	b.update(func(tx ledger.Tx) error {
		return errors.Join(
			tx.AddSamples(t.Context(), []ledger.Sample{sample(7, 1, 1), sample(8, 0, 0), sample(7, 1, 0), byRef, sample(9, 0, 0)}),
			tx.PutGroups(t.Context(), []*ledger.Group{
				{Position: 9, State: ledger.Excluded, Step: 5}, // its samples are stored and in no batch
				{Position: 8, State: ledger.Leased, Step: 5}, {Position: 7, State: ledger.Leased, Step: 5},
			}))
	})
	b.view(func(r ledger.Reader) error {
		got, err := r.Samples(t.Context(), []uint64{7})
		equal(t, "samples", got, []ledger.Sample{byRef, sample(7, 1, 0), sample(7, 1, 1)})
		batch, err2 := r.BatchSamples(t.Context(), 5)
		equal(t, "batch", batch, []ledger.Sample{byRef, sample(7, 1, 0), sample(7, 1, 1), sample(8, 0, 0)})
		none, err3 := r.BatchSamples(t.Context(), 0)
		equal(t, "no batch", len(none), 0)
		return errors.Join(err, err2, err3)
	})
	b.update(func(tx ledger.Tx) error { return tx.DropSamples(t.Context(), 7) })
	b.view(func(r ledger.Reader) error {
		got, err := r.Samples(t.Context(), []uint64{7, 8})
		equal(t, "left", got, []ledger.Sample{sample(8, 0, 0)})
		return err
	})
	err := b.store.Update(t.Context(), run, func(tx ledger.Tx) error {
		return tx.AddSamples(t.Context(), []ledger.Sample{sample(8, 0, 0)})
	})
	if err == nil {
		t.Error("a key was inserted twice")
	}
}

func pending(t *testing.T, b *bundle) {
	waits, other := sample(1, 0, 0), sample(2, 0, 0)
	waits.ReceiptDigest, other.ReceiptDigest, other.ReceiptVersion = "d", "d", 9
	b.update(func(tx ledger.Tx) error {
		return tx.AddSamples(t.Context(), []ledger.Sample{waits, other, sample(3, 0, 0)})
	})
	want := []ledger.Sample{waits}
	for range 2 {
		b.update(func(tx ledger.Tx) error {
			got, err := tx.Pending(t.Context(), 4)
			equal(t, "pending", got, want)
			return errors.Join(err, tx.Verify(t.Context(), 4))
		})
		want = nil
	}
	b.view(func(r ledger.Reader) error {
		got, err := r.Pending(t.Context(), 9)
		equal(t, "of another version", got, []ledger.Sample{other})
		return err
	})
}

func steps(t *testing.T, b *bundle) {
	leased := &ledger.Step{Step: 6, Batch: "b6", Groups: 2, Samples: 4, Excluded: 1, Zero: 1, ZeroReward: 0.25, End: 9}
	done := &ledger.Step{Step: 5, Batch: "b5", Groups: 1, WeightsDigest: "w", Chain: "c", Zero: 2, ZeroReward: -1, End: 6, Lineage: 3}
	b.update(func(tx ledger.Tx) error {
		return errors.Join(tx.PutStep(t.Context(), &ledger.Step{Step: 5, Batch: "b5"}), tx.PutStep(t.Context(), leased), tx.PutStep(t.Context(), done))
	})
	b.view(func(r ledger.Reader) error {
		five, err := r.Step(t.Context(), 5)
		six, err2 := r.Step(t.Context(), 6)
		seven, err3 := r.Step(t.Context(), 7)
		committed, err4 := r.Steps(t.Context(), ledger.StepQuery{Limit: 10})
		later, err5 := r.Steps(t.Context(), ledger.StepQuery{From: 6, Limit: 10})
		equal(t, "steps", []any{five, six, seven, committed, len(later)}, []any{done, leased, (*ledger.Step)(nil), []*ledger.Step{done}, 0})
		return errors.Join(err, err2, err3, err4, err5)
	})
	b.update(func(tx ledger.Tx) error {
		return errors.Join(tx.PutStep(t.Context(), &ledger.Step{Step: 6, Chain: "c"}), tx.PutStep(t.Context(), &ledger.Step{Step: 7, Chain: "c"}))
	})
	b.view(func(r ledger.Reader) error {
		for want, q := range map[string]ledger.StepQuery{
			"[5 6]": {Limit: 2}, "[6]": {From: 6, Limit: 1}, "[6 7]": {Limit: 2, Newest: true}, "[7]": {From: 7, Limit: 2, Newest: true},
		} {
			listed, err := r.Steps(t.Context(), q)
			if err != nil {
				return err
			}
			numbers := []uint64{}
			for _, s := range listed {
				numbers = append(numbers, s.Step)
			}
			equal(t, "steps", fmt.Sprint(numbers), want)
		}
		return nil
	})
}

func takeGroups(t *testing.T, b *bundle) {
	b.update(func(tx ledger.Tx) error {
		return tx.PutGroups(t.Context(), []*ledger.Group{
			{Position: 1, State: ledger.Leased, Step: 5}, {Position: 2, State: ledger.Leased, Step: 5},
			{Position: 3, State: ledger.Excluded, Step: 5}, {Position: 4, State: ledger.Leased, Step: 6},
		})
	})
	b.update(func(tx ledger.Tx) error {
		n, err := tx.TakeGroups(t.Context(), 5, ledger.Leased, ledger.Consumed)
		equal(t, "taken", n, uint64(2))
		return err
	})
	b.view(func(r ledger.Reader) error {
		got, err := r.ListGroups(t.Context(), ledger.GroupQuery{})
		var states []ledger.State
		for _, g := range got {
			states = append(states, g.State)
		}
		equal(t, "states", states, []ledger.State{ledger.Consumed, ledger.Consumed, ledger.Excluded, ledger.Leased})
		if err != nil {
			return err
		}
		taken, err := r.Taken(t.Context(), 5)
		equal(t, "groups of step 5", taken, got[:3])
		return err
	})
}

func weights(t *testing.T, b *bundle) {
	all := []ledger.Weights{{Digest: "a"}, {Version: 1, Digest: "b"}, {Version: 1, Lineage: 1, Digest: "c", Retrained: 4}}
	lineage := ledger.Lineage{Number: 1, First: 1, Step: 4, Old: bufferv1.OldLineage_OLD_LINEAGE_REISSUE}
	b.update(func(tx ledger.Tx) error {
		tx.Ledger().Lineage = 1
		return errors.Join(tx.PutWeights(t.Context(), all[2]), tx.PutWeights(t.Context(), all[0]), tx.PutWeights(t.Context(), all[1]),
			tx.PutLineage(t.Context(), lineage))
	})
	b.view(func(r ledger.Reader) error {
		got, err := r.Weights(t.Context(), []uint64{0, 1, 2})
		equal(t, "weights", got, all)
		none, err2 := r.Weights(t.Context(), nil)
		equal(t, "none", len(none), 0)
		first, err3 := r.ListWeights(t.Context(), 0, 1)
		equal(t, "first", first, all[:1])
		later, err4 := r.ListWeights(t.Context(), 1, 1)
		equal(t, "later", later, all[1:])
		lineages, err5 := r.Lineages(t.Context())
		equal(t, "lineages", lineages, []ledger.Lineage{lineage})
		equal(t, "newest lineage", r.Ledger().Lineage, uint32(1))
		return errors.Join(err, err2, err3, err4, err5)
	})
}

func uncovered(t *testing.T, b *bundle) {
	at := func(position uint64, number uint32) ledger.Sample {
		s := sample(position, 0, 0)
		s.Segment = number
		return s
	}
	b.update(func(tx ledger.Tx) error {
		return errors.Join(
			tx.PutGroups(t.Context(), []*ledger.Group{
				{Position: 1, State: ledger.Consumed, Step: 5}, {Position: 2, State: ledger.Consumed, Step: 6},
				{Position: 3, State: ledger.Open}, {Position: 4, State: ledger.Ready}, {Position: 5, State: ledger.Leased, Step: 7},
			}),
			tx.AddSamples(t.Context(), []ledger.Sample{at(1, 1), at(2, 2), at(3, 3), at(4, 4), at(5, 5)}),
			tx.PutSegment(t.Context(), ledger.Segment{Number: 2, Bytes: 20}), tx.PutSegment(t.Context(), ledger.Segment{Number: 1, Bytes: 9}),
			tx.PutSegment(t.Context(), ledger.Segment{Number: 1, Bytes: 10, Trimmed: true}))
	})
	b.view(func(r ledger.Reader) error {
		segments, err := r.Segments(t.Context())
		equal(t, "segments", segments, []ledger.Segment{{Number: 1, Bytes: 10, Trimmed: true}, {Number: 2, Bytes: 20}})
		after5, err2 := r.Uncovered(t.Context(), 5)
		equal(t, "after step 5", after5, map[uint32]bool{2: true, 3: true, 4: true, 5: true})
		after6, err3 := r.Uncovered(t.Context(), 6)
		equal(t, "after step 6", after6, map[uint32]bool{3: true, 4: true, 5: true})
		return errors.Join(err, err2, err3)
	})
}

func apart(t *testing.T, b *bundle) {
	const other = "run-01jz0000000000000000000001"
	b.create(other)
	fill(t, b)
	err := b.store.View(t.Context(), other, func(r ledger.Reader) error {
		g, err := r.ListGroups(t.Context(), ledger.GroupQuery{})
		s, err2 := r.BatchSamples(t.Context(), 5)
		w, err3 := r.Weights(t.Context(), []uint64{1})
		seg, err4 := r.Segments(t.Context())
		u, err5 := r.Uncovered(t.Context(), 0)
		steps, err6 := r.Steps(t.Context(), ledger.StepQuery{Limit: 10})
		if n := len(g) + len(s) + len(w) + len(seg) + len(u) + len(steps); n > 0 {
			t.Errorf("%d rows of another run", n)
		}
		return errors.Join(err, err2, err3, err4, err5, err6)
	})
	if err != nil {
		t.Error(err)
	}
}

func fill(t *testing.T, b *bundle) {
	t.Helper()
	b.update(func(tx ledger.Tx) error {
		l := tx.Ledger()
		l.Step, l.Chain, l.Arrivals, l.Trimmed, l.WeightsVersion, l.WeightsDigest = 5, "c", 6, 7, 8, "w"
		l.Groups = [7]uint64{0, 1, 2, 3, 4, 5, 6}
		l.Samples, l.Duplicates, l.Refused, l.InfraFailed, l.Skipped = 9, 10, 11, 12, 13
		l.Failures = map[string]uint64{"ENVIRONMENT_TIMEOUT": 7, "\"": 5}
		return errors.Join(
			tx.PutGroups(t.Context(), []*ledger.Group{{Position: 1, State: ledger.Consumed, Step: 5}}),
			tx.AddSamples(t.Context(), []ledger.Sample{sample(1, 0, 0)}),
			tx.PutStep(t.Context(), &ledger.Step{Step: 5, WeightsDigest: "w"}), tx.PutWeights(t.Context(), ledger.Weights{Version: 1, Digest: "w"}),
			tx.PutSegment(t.Context(), ledger.Segment{Number: 1}))
	})
}

func reopen(t *testing.T, b *bundle) {
	fill(t, b)
	before := b.ledger()
	b.store = b.open(t, b.folder)
	equal(t, "ledger", b.ledger(), before)
	if before.InfraFailed != 12 || before.Failures["ENVIRONMENT_TIMEOUT"] != 7 || before.Failures["\""] != 5 || before.Skipped != 13 || before.Groups[ledger.Dissolved] != 6 || before.WeightsDigest != "w" || before.Trimmed != 7 {
		t.Errorf("not everything was stored: %+v", before)
	}
	b.view(func(r ledger.Reader) error {
		s, err := r.BatchSamples(t.Context(), 5)
		equal(t, "samples", s, []ledger.Sample{sample(1, 0, 0)})
		return err
	})
}

// unused marks the payloads of dropped, refused, and trimmed samples.
func unused(t *testing.T, b *bundle) {
	sample := func(position uint64, ref string) ledger.Sample {
		return ledger.Sample{Position: position, Ref: ref, Outcome: trajectoryv1.Outcome_OUTCOME_COMPLETED}
	}
	want := func(what string, unused, needed []string) {
		t.Helper()
		b.view(func(r ledger.Reader) error {
			u, n, err := r.Unused(t.Context(), 100)
			if !slices.Equal(u, unused) || !slices.Equal(n, needed) {
				t.Errorf("%s: unused %v, needed %v; want %v and %v", what, u, n, unused, needed)
			}
			return err
		})
	}
	b.update(func(tx ledger.Tx) error {
		groups := []*ledger.Group{{Position: 1, State: ledger.Consumed, Step: 5}, {Position: 2, State: ledger.Consumed, Step: 6}, {Position: 3, State: ledger.Open}, {Position: 4, State: ledger.Open}}
		return errors.Join(tx.PutGroups(t.Context(), groups), tx.AddSamples(t.Context(), []ledger.Sample{
			sample(1, "a"), sample(2, "b"), sample(3, "c"), sample(4, "d"), {Position: 1, Sample: 1, Segment: 1},
		}))
	})
	want("nothing is marked", nil, nil)
	b.update(func(tx ledger.Tx) error { return tx.DropSamples(t.Context(), 3) })
	b.update(func(tx ledger.Tx) error { return tx.MarkUnused(t.Context(), []string{"d", "e", "e"}) })
	want("dropped, refused, and repeated", []string{"c", "e"}, []string{"d"})
	if runs, err := b.store.WithUnused(t.Context()); err != nil || !slices.Equal(runs, []string{run}) {
		t.Errorf("runs %v, %v", runs, err)
	}
	b.update(func(tx ledger.Tx) error { return tx.Forget(t.Context(), []string{"c", "d", "e"}) })
	want("forgotten", nil, nil)
	b.update(func(tx ledger.Tx) error {
		tx.Ledger().Trimmed = 5
		return tx.MarkTrimmed(t.Context(), 0, 5)
	})
	want("trimmed", []string{"a"}, nil)
}

// deleted deletes one ledger, more than a transaction of it, and leaves the other.
func deleted(t *testing.T, b *bundle) {
	const other = "run-01jz0000000000000000000001"
	b.create(other)
	fill := func(run string) {
		if err := b.store.Update(t.Context(), run, func(tx ledger.Tx) error {
			var err error
			for p := uint64(0); p < 9000; p += 100 {
				err = errors.Join(err, tx.PutGroups(t.Context(), []*ledger.Group{{Position: p, State: ledger.Open}}),
					tx.AddSamples(t.Context(), []ledger.Sample{{Position: p}}))
			}
			return errors.Join(err, tx.PutStep(t.Context(), &ledger.Step{Step: 5, Batch: "b"}), tx.PutWeights(t.Context(), ledger.Weights{Version: 5, Digest: "w"}),
				tx.PutSegment(t.Context(), ledger.Segment{Number: 1}), tx.MarkUnused(t.Context(), []string{"u"}))
		}); err != nil {
			t.Fatal(err)
		}
	}
	fill(run)
	fill(other)
	for range 2 { // an unknown run is no error
		if err := b.store.Delete(t.Context(), run); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.store.View(t.Context(), run, func(ledger.Reader) error { return nil }); !errors.Is(err, ledger.ErrNoLedger) {
		t.Errorf("the deleted ledger: %v", err)
	}
	if err := b.store.View(t.Context(), other, func(r ledger.Reader) error {
		groups, err := r.ListGroups(t.Context(), ledger.GroupQuery{})
		if len(groups) != 90 {
			t.Errorf("the other ledger has %d groups", len(groups))
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	b.create(run) // with the same id nothing returns
	b.view(func(r ledger.Reader) error {
		groups, err := r.ListGroups(t.Context(), ledger.GroupQuery{})
		steps, failed := r.Steps(t.Context(), ledger.StepQuery{})
		segments, also := r.Segments(t.Context())
		if len(groups)+len(steps)+len(segments) > 0 || r.Ledger().Revision != 0 {
			t.Errorf("%d groups, %d steps, %d segments are left", len(groups), len(steps), len(segments))
		}
		return errors.Join(err, failed, also)
	})
}
