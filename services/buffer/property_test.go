package buffer_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
	"github.com/rollout-rl/rollout/services/buffer/sqlstore"
)

// TestEveryPositionIsConsumedOnce sends random arrivals, duplicates, failures, wrong receipts, and
// later attempts to a ledger, crashes it between and within calls, and then counts.
func TestEveryPositionIsConsumedOnce(t *testing.T) {
	t.Parallel()
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			w := &world{T: t, rand: rand.New(rand.NewPCG(seed, 7)), folder: t.TempDir(), sent: map[uint64]uint32{}, batches: map[uint64]*bufferv1.Batch{}}
			w.config = ledgerConfig()
			w.config.MaxStaleness = uint32(seed % 3)
			if seed%2 == 1 {
				w.config.Order = bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION
			}
			w.start()
			for acts := 0; w.step < totalSteps; acts++ {
				if acts > 5000 {
					groups, _ := w.server.ListGroups(t.Context(), &bufferv1.ListGroupsRequest{RunId: run})
					t.Fatalf("it does not finish: %d of %d steps, %d messages, groups %v", w.step, totalSteps, len(w.wire), groups)
				}
				w.act()
			}
			w.audit()
			w.crash()
			w.audit()
			if old := w.config.GetMaxStaleness() > 0; old != (w.aged > 0) {
				t.Errorf("samples were %d steps behind in all, %d are allowed each", w.aged, w.config.GetMaxStaleness())
			}
		})
	}
}

const (
	totalSteps  = 6
	perStep     = 2
	totalGroups = totalSteps * perStep
)

var errInjected = errors.New("injected")

// world is a small model of a scheduler, workers, a stream, and a learner.
type world struct {
	*testing.T
	rand    *rand.Rand
	folder  string
	config  *bufferv1.LedgerConfig
	store   *sqlstore.Store
	server  *buffer.Server
	wire    []*trajectoryv1.TrajectoryEnvelope // published and not acked
	sent    map[uint64]uint32                  // position -> newest attempt issued
	next    uint64                             // first position not issued
	step    uint64                             // committed
	known   bool                               // version 0 is recorded
	batches map[uint64]*bufferv1.Batch         // as first leased
	fault   func() error                       // how the next transaction fails
	crashes int
	aged    int // sum of the staleness of all samples, in steps
}

// faulty makes transactions fail before, within, or after their commit.
type faulty struct {
	ledger.Store
	w *world
}

func (f faulty) Update(ctx context.Context, run string, fn func(ledger.Tx) error) error {
	if f.w.fault == nil {
		return f.Store.Update(ctx, run, fn)
	}
	fault := f.w.fault
	f.w.fault = nil
	switch err := fault(); {
	case errors.Is(err, context.Canceled): // within
		return f.Store.Update(ctx, run, func(tx ledger.Tx) error { return errors.Join(fn(tx), errInjected) })
	default: // after: it is durable, but the caller gets an error
		return errors.Join(f.Store.Update(ctx, run, fn), errInjected)
	}
}

func (w *world) start() {
	w.Helper()
	var err error
	if w.store, err = sqlstore.Open(w.Context(), sqldb.Files(w.folder)); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = w.store.Close() })
	cfg := buffer.Config{Segments: filepath.Join(w.folder, "segments"), SegmentBytes: 4 << 10}
	if w.server, err = buffer.New(cfg, buffer.Deps{Store: faulty{w.store, w}}); err != nil {
		w.Fatal(err)
	}
	if _, err := w.server.OpenLedger(w.Context(), &bufferv1.OpenLedgerRequest{RunId: run, Config: w.config}); err != nil {
		w.Fatal(err)
	}
}

// crash loses everything that is not durable.
func (w *world) crash() {
	w.crashes++
	w.fault = nil
	w.server.Stop()
	if err := w.store.Close(); err != nil {
		w.Fatal(err)
	}
	w.start()
}

// check tolerates only injected faults, and crashes after one.
func (w *world) check(err error) bool {
	w.Helper()
	if err == nil {
		return true
	}
	if !errors.Is(err, errInjected) {
		w.Fatal(err)
	}
	w.crash()
	return false
}

func (w *world) act() {
	if w.rand.IntN(12) == 0 {
		within := w.rand.IntN(2) == 0
		w.fault = func() error {
			if within {
				return context.Canceled
			}
			return errInjected
		}
	}
	switch w.rand.IntN(10) {
	case 0:
		w.crash()
	case 1, 2:
		w.issue()
	case 3:
		w.decide()
	case 4:
		w.redispatch()
	case 5, 6:
		w.train()
	case 7:
		_, err := w.server.RecordWeights(w.Context(), &bufferv1.RecordWeightsRequest{RunId: run, Digest: digest(0)})
		w.known = w.check(err) || w.known
	default:
		w.deliver()
	}
}

// issue issues the next group within the staleness bound.
func (w *world) issue() {
	if w.next < totalGroups && w.next < (w.step+1+uint64(w.config.GetMaxStaleness()))*perStep {
		w.sample(w.next, 0, []uint32{0, 1, 2, 3})
		w.next++
	}
}

// sample publishes samples of a group with the newest weights; some are damaged.
func (w *world) sample(position uint64, attempt uint32, samples []uint32) {
	w.sent[position] = attempt
	version := w.step
	if w.rand.IntN(4) == 0 { // a worker that does not have the newest weights
		version -= min(w.step, 1+w.rand.Uint64N(2))
	}
	for _, n := range samples {
		e := ofVersion(sampleOf(position, attempt, n), version)
		e.Header.Reward = w.rand.Float64() // distinguishes duplicates
		e = seal(e.Header)
		switch w.rand.IntN(40) {
		case 0:
			e = failed(e, trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, "X")
		case 1:
			e.Header.Receipt.Digest = digest(99)
		case 2:
			e.Payload[len(e.Payload)/2] ^= 4
		}
		w.wire = append(w.wire, e)
		if w.rand.IntN(5) == 0 { // a duplicate by another worker
			duplicate := ofVersion(sampleOf(position, attempt, n), w.step)
			duplicate.Header.Reward = -1
			w.wire = append(w.wire, seal(duplicate.Header))
		}
	}
}

// deliver passes a random part of the stream to the ledger in random order. Sometimes the ack is
// lost.
func (w *world) deliver() {
	w.rand.Shuffle(len(w.wire), func(i, j int) { w.wire[i], w.wire[j] = w.wire[j], w.wire[i] })
	n := w.rand.IntN(min(len(w.wire), 9) + 1)
	_, err := w.server.Accept(w.Context(), run, w.wire[:n])
	if w.check(err) && w.rand.IntN(4) > 0 {
		w.wire = w.wire[n:]
	}
}

// redispatch samples the missing samples of issued groups, like a worker with a redelivered item.
// The ledger has the open attempt, because a reissue may have happened although its answer was
// lost.
func (w *world) redispatch() {
	if len(w.wire) > 0 {
		return // messages are still on their way
	}
	open, err := w.server.ListGroups(w.Context(), &bufferv1.ListGroupsRequest{RunId: run, States: []bufferv1.GroupState{ledger.Open}})
	if err != nil {
		w.Fatal(err)
	}
	for _, g := range open.GetGroups() {
		w.sent[g.GetPosition()] = g.GetKey().GetAttempt()
	}
	for position := range w.next {
		attempt := w.sent[position]
		r, err := w.server.GetMissing(w.Context(), &bufferv1.GetMissingRequest{RunId: run, Groups: keys(position, attempt)})
		if err != nil {
			w.Fatal(err)
		}
		w.sample(position, attempt, r.GetGroups()[0].GetSamples())
	}
}

// decide reissues or excludes dissolved groups.
func (w *world) decide() {
	r, err := w.server.ListGroups(w.Context(), &bufferv1.ListGroupsRequest{RunId: run, States: []bufferv1.GroupState{ledger.Dissolved}})
	if err != nil {
		w.Fatal(err)
	}
	for _, g := range r.GetGroups() {
		if g.GetFailures() >= w.config.GetGroupAttempts() {
			_, err := w.server.ExcludeGroups(w.Context(), &bufferv1.ExcludeGroupsRequest{RunId: run, Groups: []*bufferv1.GroupKey{g.GetKey()}, Reason: "X"})
			if !w.check(err) {
				return
			}
			continue
		}
		attempt := g.GetKey().GetAttempt() + 1
		_, err := w.server.ReissueGroups(w.Context(), &bufferv1.ReissueGroupsRequest{RunId: run, Groups: keys(g.GetPosition(), attempt)})
		if !w.check(err) {
			return
		}
		w.sample(g.GetPosition(), attempt, []uint32{0, 1, 2, 3})
	}
}

// train leases the next step and commits it. A step keeps its batch, whatever happens in between.
func (w *world) train() {
	step := w.step + 1
	r, err := w.server.LeaseBatch(w.Context(), &bufferv1.LeaseBatchRequest{RunId: run, Step: step})
	if !w.check(err) || r.GetBatch() == nil {
		return
	}
	w.fresh(r.GetBatch())
	if first := w.batches[step]; first != nil && !proto.Equal(first, r.GetBatch()) {
		w.Fatalf("step %d was leased as %v, then as %v", step, first, r.GetBatch())
	}
	w.batches[step] = r.GetBatch()
	if w.rand.IntN(3) == 0 {
		w.crash()
		return
	}
	_, err = w.server.CommitStep(w.Context(), &bufferv1.CommitStepRequest{RunId: run, Step: step, BatchId: r.GetBatch().GetBatchId(), WeightsDigest: digest(step)})
	if w.check(err) {
		w.step = step
	}
}

// fresh fails if a batch has a sample of weights that are older than the run allows.
func (w *world) fresh(b *bufferv1.Batch) {
	w.Helper()
	for _, ref := range b.GetSamples() {
		payload := &trajectoryv1.Trajectory{}
		raw, err := w.read(ref)
		if err != nil || proto.Unmarshal(raw, payload) != nil {
			w.Fatalf("payload of %v: %v", ref.GetKey(), err)
		}
		for _, span := range payload.GetVersionSpans() {
			if age := b.GetStep() - 1 - span.GetVersion(); age > uint64(w.config.GetMaxStaleness()) {
				w.Errorf("step %d trains on %v by version %d: %d steps old, %d are allowed", b.GetStep(), ref.GetKey(), span.GetVersion(), age, w.config.GetMaxStaleness())
			}
			w.aged += int(b.GetStep() - 1 - span.GetVersion())
		}
	}
}

// audit verifies what became of every position.
func (w *world) audit() {
	w.Helper()
	consumed := map[uint64]uint64{}
	chain := ""
	steps, err := w.server.ListSteps(w.Context(), &bufferv1.ListStepsRequest{RunId: run})
	if err != nil || len(steps.GetSteps()) != totalSteps {
		w.Fatalf("%d steps: %v", len(steps.GetSteps()), err)
	}
	for _, step := range steps.GetSteps() {
		if step.GetChain() == chain || step.GetWeightsDigest() != digest(step.GetStep()) {
			w.Errorf("step %v", step)
		}
		chain = step.GetChain()
		r, err := w.server.GetBatch(w.Context(), &bufferv1.GetBatchRequest{RunId: run, Step: step.GetStep()})
		if err != nil || !proto.Equal(r.GetBatch(), w.batches[step.GetStep()]) {
			w.Fatalf("batch of step %d changed: %v", step.GetStep(), err)
		}
		for _, p := range positions(w, r.GetBatch()) {
			if consumed[p] != 0 {
				w.Errorf("position %d is in steps %d and %d", p, consumed[p], step.GetStep())
			}
			consumed[p] = step.GetStep()
		}
		if n := len(r.GetBatch().GetSamples()); n != size*int(r.GetBatch().GetGroups()) || r.GetBatch().GetGroups()+r.GetBatch().GetExcluded() != perStep {
			w.Errorf("step %d: %d samples in %d groups, %d excluded", step.GetStep(), n, r.GetBatch().GetGroups(), r.GetBatch().GetExcluded())
		}
		for _, ref := range r.GetBatch().GetSamples() {
			w.payload(ref)
		}
	}
	groups, err := w.server.ListGroups(w.Context(), &bufferv1.ListGroupsRequest{RunId: run})
	if err != nil || len(groups.GetGroups()) != totalGroups {
		w.Fatalf("%d groups: %v", len(groups.GetGroups()), err)
	}
	for p, g := range groups.GetGroups() {
		excluded := g.GetState() == ledger.Excluded && consumed[uint64(p)] == 0 && g.GetReason() != ""
		if once := g.GetState() == ledger.Consumed && consumed[uint64(p)] == g.GetStep(); !once && !excluded {
			w.Errorf("position %d: %v, in step %d", p, g, consumed[uint64(p)])
		}
	}
	if w.crashes == 0 {
		w.Error("nothing crashed, so the test tested nothing")
	}
}

// payload reads a sample at the place in its ref and compares the two.
func (w *world) payload(ref *bufferv1.SampleRef) {
	w.Helper()
	raw, err := w.read(ref)
	if err != nil {
		w.Fatal(err)
	}
	var got trajectoryv1.Trajectory
	if err := proto.Unmarshal(raw, &got); err != nil || !proto.Equal(got.GetKey(), ref.GetKey()) || got.GetReward() != ref.GetReward() {
		w.Errorf("payload of %v, want %v (%v)", got.GetKey(), ref, err)
	}
}

func (w *world) read(ref *bufferv1.SampleRef) ([]byte, error) {
	reader := segment.NewReader(filepath.Join(w.folder, "segments", run))
	defer reader.Close()
	var number uint32
	if _, err := fmt.Sscanf(filepath.Base(ref.GetSegment()), "%d.seg", &number); err != nil {
		return nil, err
	}
	return reader.Read(segment.Place{Segment: number, Offset: ref.GetOffset(), Length: ref.GetLength()}, ref.GetCrc32C())
}

func TestReasonsAreStable(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]string{
		ledger.ErrNoLedger: "LEDGER_NOT_FOUND", ledger.ErrDigest: "WEIGHTS_DIGEST_CONFLICT", ledger.ErrStep: "STEP_CONFLICT",
		buffer.ErrLost: "PAYLOAD_LOST", buffer.ErrTrimmed: "PAYLOADS_TRIMMED",
	} {
		if got := rpcerr.Reason(err); got != want {
			t.Errorf("%v has reason %s, want %s", err, got, want)
		}
	}
}
