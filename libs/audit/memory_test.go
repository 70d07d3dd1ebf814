package audit

import (
	"runtime"
	"runtime/metrics"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// perStep is the number of groups that a step of a long run takes.
const perStep = 100

// long is a finished run of so many steps. As in an asynchronous run, steps take groups in another
// order than that of positions: an even step and the one after it exchange every second group.
func long(t *testing.T, steps uint64) *Evidence {
	t.Helper()
	e := intact().Evidence
	c := e.Run.GetPlan().GetConfig()
	c.Train.Steps, c.Train.GroupsPerStep = proto.Uint64(steps), proto.Uint32(perStep)
	e.Run.State, e.Run.Step, e.Run.WeightsDigest = runv1.RunState_RUN_STATE_SUCCEEDED, steps, digestOf(steps)
	e.Run.Plan.Inputs[0].Rows, e.Ledger.Config.Rows = steps*perStep, steps*perStep // one epoch, because each one has its counts
	e.Ledger.Config.GroupsPerStep, e.Ledger.Config.Order = perStep, bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION
	e.Ledger.Chain = ""
	e.Ledger.State = &bufferv1.LedgerState{Step: steps, Consumed: steps * perStep}
	e.CursorBefore, e.CursorAfter, e.Snapshots, e.Weights = steps*perStep, steps*perStep, nil, nil
	e.Rows = NewRows(t.TempDir())
	add := func(m *bufferv1.ExportLedgerResponse) {
		if err := e.Add(m); err != nil {
			t.Fatal(err)
		}
	}
	taken := map[uint64][]*bufferv1.SampleRecord{}
	for step := uint64(1); step <= steps; step++ {
		m := &bufferv1.ExportLedgerResponse{}
		for p := (step - 1) * perStep; p < step*perStep; p++ {
			by := step
			if other := (step - 1) ^ 1 + 1; p%2 == 1 && other <= steps {
				by = other
			}
			g := groupOf(p, consumed, by)
			g.Key = &bufferv1.GroupKey{Index: p}
			m.Groups = append(m.Groups, g)
			for n := range uint32(testSize) {
				s := sampleOf(p, n, by-1)
				s.Segment = uint32(step)
				s.Key.Epoch, s.Key.Index, s.Ref.Key.Epoch, s.Ref.Key.Index = 0, p, 0, p
				m.Samples, taken[by] = append(m.Samples, s), append(taken[by], s)
			}
		}
		m.Weights = append(m.Weights, &bufferv1.WeightsRecord{Version: step - 1, Digest: digestOf(step - 1)})
		m.Segments = append(m.Segments, &bufferv1.SegmentRecord{Number: uint32(step), Bytes: 1, FileBytes: 1})
		add(m)
		if step%2 == 1 && step < steps {
			continue
		}
		for s := step - (step+1)%2; s <= step; s++ { // both of a pair
			record := &bufferv1.StepRecord{Step: s, Groups: perStep, Samples: uint32(len(taken[s])), EndPosition: s * perStep, BatchId: batchID(taken[s]), WeightsDigest: digestOf(s)}
			record.Chain = chainLink(e.Ledger.GetChain(), record)
			e.Ledger.Chain = record.GetChain()
			add(&bufferv1.ExportLedgerResponse{Steps: []*bufferv1.StepRecord{record}})
			delete(taken, s)
		}
	}
	add(&bufferv1.ExportLedgerResponse{Weights: []*bufferv1.WeightsRecord{{Version: steps, Digest: digestOf(steps)}}})
	return &e
}

// live returns the median of the live heap while do runs, in bytes. A collection also counts what
// is allocated while it marks, so single values are too large.
func live(do func()) uint64 {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		do()
	}()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	for all := []uint64{}; ; {
		runtime.GC()
		metrics.Read(sample)
		all = append(all, sample[0].Value.Uint64())
		select {
		case <-ended:
			slices.Sort(all)
			return all[len(all)/2]
		case <-tick.C:
		}
	}
}

// The memory of an audit does not grow with the number of groups: twice as many need the same.
// This test does not run in parallel with others, because it measures the whole process.
func TestMemoryDoesNotGrowWithTheGroups(t *testing.T) {
	measure := func(steps uint64) uint64 {
		return live(func() {
			e := long(t, steps)
			defer e.Close()
			r, err := Check(e)
			if err != nil {
				t.Error(err)
				return
			}
			if !r.Whole || r.Samples.Verified != steps*perStep*testSize {
				t.Errorf("%d steps: %d samples verified, %.3v", steps, r.Samples.Verified, r.Breaks)
			}
		})
	}
	small, large := measure(2400), measure(4800) // the buffers of the sorters are full in both
	t.Logf("240,000 groups: %.1f MiB; 480,000 groups: %.1f MiB", float64(small)/(1<<20), float64(large)/(1<<20))
	if large > small+16<<20 { // 70 bytes a group, of which a row alone takes more; what is allocated during a mark counts too
		t.Errorf("the audit of 240,000 groups had %d bytes of live heap, that of 480,000 groups %d", small, large)
	}
}

// Steps of an asynchronous run take groups out of order, and damage of one is found in its step.
func TestABatchOutOfOrderIsVerified(t *testing.T) {
	t.Parallel()
	e := long(t, 4)
	defer e.Close()
	extra := sampleOf(0, 5, 3)
	extra.Ref.Key.Index = 201 // of the fourth step
	if err := e.Add(&bufferv1.ExportLedgerResponse{Samples: []*bufferv1.SampleRecord{extra}}); err != nil {
		t.Fatal(err)
	}
	r, err := Check(e)
	if err != nil {
		t.Fatal(err)
	}
	var steps []uint64
	for _, b := range r.Breaks {
		if b.Kind == "BATCH_CHANGED" {
			steps = append(steps, b.Step)
		}
	}
	if len(steps) != 1 || steps[0] != 4 {
		t.Errorf("changed batches of steps %v: %.5v", steps, r.Breaks)
	}
}

func TestTheListOfBreaksIsLimited(t *testing.T) {
	t.Parallel()
	e := intact()
	for n := range uint32(maxBreaks + 7) {
		s := sampleOf(9, n, 0)
		s.Segment = 0
		e.Samples = append(e.Samples, s)
	}
	if r := e.audit(t); r.Whole || len(r.Breaks) != maxBreaks || r.Omitted != 7 {
		t.Errorf("%d breaks, %d omitted", len(r.Breaks), r.Omitted)
	}
}
