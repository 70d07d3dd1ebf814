package buffer_test

import (
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

var ioEOF = io.EOF

// Groups that agents sample are not what inference workers are asked for.
func TestALedgerWaitsForAgents(t *testing.T) {
	t.Parallel()
	s := setup(t)
	c := ledgerConfig()
	c.External = true
	s.open(c)
	if w := s.waiting(1); w != "2 of 2 groups of step 1 (agents)" {
		t.Errorf("waits for %q", w)
	}
}

func TestAStepFromTheStreamToTheCommit(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	s.publish(append(groupOf(1, 0, 0), groupOf(2, 0, 0)...)...)
	s.samples(2 * size)
	if w := s.waiting(1); w != "1 of 2 groups of step 1 (inference workers)" {
		t.Errorf("waits for %q", w)
	}
	s.publish(groupOf(0, 0, 0)[2:]...)
	s.publish(groupOf(0, 0, 0)[:2]...)
	b := s.lease(1)
	if got := positions(t, b); !reflect.DeepEqual(got, []uint64{0, 1}) || b.GetGroups() != 2 || len(b.GetSamples()) != 2*size {
		t.Fatalf("batch of %v: %v", got, b)
	}
	if again := s.lease(1); !proto.Equal(again, b) {
		t.Errorf("leased again: %v", again)
	}
	got, err := s.payloads(1)
	if err != nil || len(got) != 2*size {
		t.Fatalf("%d payloads: %v", len(got), err)
	}
	for i, ref := range b.GetSamples() { // through the stream and from the file
		if !proto.Equal(got[i].GetKey(), ref.GetKey()) || ref.GetReward() != got[i].GetReward() {
			t.Errorf("payload %d is of %v, want %v", i, got[i].GetKey(), ref.GetKey())
		}
		file, err := os.ReadFile(ref.GetSegment())
		if err != nil || segment.CRC(file[ref.GetOffset():ref.GetOffset()+ref.GetLength()]) != ref.GetCrc32C() {
			t.Errorf("by file: %v", err)
		}
	}
	first := s.commit(b)
	if second := s.commit(b); !proto.Equal(first, second) || first.GetGroups() != 2 || first.GetSamples() != 2*size || first.GetChain() == "" {
		t.Errorf("%v then %v", first, second)
	}
	l := s.until("step 1", func(l *bufferv1.LedgerState) bool { return l.GetStep() == 1 })
	if l.GetConsumed() != 2 || l.GetReady() != 1 || l.GetLeased() != 0 || l.GetWeightsDigest() != digest(1) || l.GetWeightsVersion() != 1 {
		t.Errorf("%v", l)
	}
	if again, err := s.client.GetBatch(t.Context(), &bufferv1.GetBatchRequest{RunId: run, Step: 1}); err != nil || !proto.Equal(again.GetBatch(), b) {
		t.Errorf("committed batch: %v %v", again, err)
	}
}

func TestDuplicatesAndLateSamplesAreDroppedAndCounted(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	twin := sampleOf(0, 0, 0)
	twin.Header.Reward = 77
	s.publish(append(append(groupOf(0, 0, 0), twin), groupOf(1, 0, 0)...)...)
	b := s.lease(1)
	if b.GetSamples()[0].GetReward() != 0 {
		t.Error("the twin won")
	}
	s.commit(b)
	s.publish(groupOf(0, 0, 0)...) // consumed
	s.publish(groupOf(0, 1, 0)...) // consumed by a later attempt
	l := s.until("the drops", func(l *bufferv1.LedgerState) bool { return l.GetDuplicates() == 1+2*size })
	if l.GetSamples() != 2*size || l.GetConsumed() != 2 {
		t.Errorf("%v", l)
	}
}

func TestFailureDissolvesUntilReissueOrExclusion(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	all := trajectoryv1.Outcome_OUTCOME_INFRA_FAILED
	s.publish(sampleOf(0, 0, 0), failed(sampleOf(0, 0, 1), all, "REWARD_TIMEOUT"), failed(sampleOf(0, 0, 2), all, "REWARD_TIMEOUT"), sampleOf(0, 0, 3))
	s.publish(failed(sampleOf(1, 0, 0), trajectoryv1.Outcome_OUTCOME_ABORTED, ""))
	l := s.until("two dissolved groups", func(l *bufferv1.LedgerState) bool { return len(l.GetDissolved()) == 2 })
	g := l.GetDissolved()[0]
	if g.GetReason() != "REWARD_TIMEOUT" || g.GetState() != bufferv1.GroupState_GROUP_STATE_DISSOLVED || g.GetFailures() != 1 || l.GetInfraFailed() != 2 {
		t.Errorf("%v", l)
	}
	if l.GetDissolved()[1].GetReason() != "ABORTED" {
		t.Errorf("%v", l.GetDissolved()[1])
	}
	if w := s.waiting(1); w != "the next attempt of 2 dissolved groups (scheduler), such as group 0/0 after attempt 0: REWARD_TIMEOUT" {
		t.Errorf("waits for %q", w)
	}
	s.reissue(0, 1)
	s.reissue(0, 1)
	missing, err := s.client.GetMissing(t.Context(), &bufferv1.GetMissingRequest{RunId: run, Groups: append(keys(0, 0), append(keys(0, 1), keys(7, 0)...)...)})
	if err != nil || len(missing.GetGroups()[0].GetSamples()) != 0 || !reflect.DeepEqual(missing.GetGroups()[1].GetSamples(), []uint32{0, 1, 2, 3}) ||
		len(missing.GetGroups()[2].GetSamples()) != size {
		t.Errorf("missing: %v %v", missing, err)
	}
	s.publish(groupOf(0, 0, 0)...) // of the previous attempt
	s.publish(groupOf(0, 1, 0)...)
	_, err = s.client.ExcludeGroups(t.Context(), &bufferv1.ExcludeGroupsRequest{RunId: run, Groups: keys(1, 0), Reason: "ATTEMPTS_EXHAUSTED"})
	if err != nil {
		t.Fatal(err)
	}
	b := s.lease(1)
	if got := positions(t, b); !reflect.DeepEqual(got, []uint64{0}) || b.GetExcluded() != 1 || b.GetSamples()[0].GetKey().GetAttempt() != 1 {
		t.Errorf("%v", b)
	}
	s.commit(b)
	groups, err := s.client.ListGroups(t.Context(), &bufferv1.ListGroupsRequest{RunId: run})
	if err != nil || len(groups.GetGroups()) != 2 || groups.GetGroups()[1].GetReason() != "ATTEMPTS_EXHAUSTED" || groups.GetGroups()[0].GetStep() != 1 {
		t.Errorf("%v %v", groups, err)
	}
}

func TestReceiptsAreChecked(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	wrong, none, older, corrupt, alien, empty, shape := sampleOf(0, 0, 0), sampleOf(1, 0, 0), sampleOf(2, 0, 0), sampleOf(3, 0, 0), sampleOf(4, 0, 0), sampleOf(5, 0, 0), sampleOf(6, 0, 0)
	wrong.Header.Receipt.Digest = digest(9)
	none.Header.Receipt = nil
	older.Header.MaxVersion = 1 // sampled with newer weights than the receipt names
	corrupt.Payload[3] ^= 1
	alien.Header.Key.Index = 99
	empty.Payload = nil
	shape.Header.GroupSize = 3
	s.publish(wrong, none, older, corrupt, alien, empty, shape)
	l := s.until("refusals", func(l *bufferv1.LedgerState) bool { return l.GetRefused() == 7 })
	var reasons []string
	for _, g := range l.GetDissolved() {
		reasons = append(reasons, g.GetReason())
	}
	want := []string{"RECEIPT_MISMATCH", "RECEIPT_MISSING", "RECEIPT_MISMATCH", "PAYLOAD_CORRUPT", "PAYLOAD_MISSING", "GROUP_SIZE_MISMATCH"}
	if !reflect.DeepEqual(reasons, want) || l.GetSamples() != 0 {
		t.Errorf("%v", l)
	}
	s.stop() // events were sent before that
	if got := s.events.reasons(); got["RECEIPT_MISMATCH"] != 1 || got["BAD_KEY"] != 1 {
		t.Errorf("events: %v", got)
	}
}

func TestReceiptOfAVersionThatIsRecordedLater(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	bad := groupOf(1, 0, 0)
	bad[2].Header.Receipt.Digest = digest(5)
	s.publish(append(groupOf(0, 0, 0), bad...)...)
	l := s.until("samples", func(l *bufferv1.LedgerState) bool { return l.GetSamples() == 2*size })
	if l.GetReady() != 0 || l.GetOpen() != 2 {
		t.Errorf("ready without a digest: %v", l)
	}
	if w := s.waiting(1); w != "the digest of the weights that sampled 2 groups (learner-controller)" {
		t.Errorf("waits for %q", w)
	}
	s.restart()
	s.record(0)
	l = s.until("verification", func(l *bufferv1.LedgerState) bool { return l.GetReady() == 1 })
	if l.GetRefused() != 1 || len(l.GetDissolved()) != 1 || l.GetDissolved()[0].GetPosition() != 1 {
		t.Errorf("%v", l)
	}
}

func TestStaleGroupsAreDissolvedAtTheLease(t *testing.T) {
	t.Parallel()
	s := setup(t)
	c := ledgerConfig()
	c.MaxStaleness = 1
	s.open(c)
	s.record(0)
	mixed := groupOf(5, 0, 1)
	mixed[3] = ofVersion(mixed[3], 0)
	s.publish(slices.Concat(groupOf(0, 0, 0), groupOf(1, 0, 0), groupOf(2, 0, 0), groupOf(3, 0, 0), groupOf(4, 0, 1), mixed)...)
	s.commit(s.lease(1))
	s.commit(s.lease(2)) // version 1 trains on tokens of version 0: allowed
	if w := s.waiting(3); !strings.Contains(w, "1 dissolved") {
		t.Errorf("waits for %q", w)
	}
	l := s.until("dissolution", func(l *bufferv1.LedgerState) bool { return len(l.GetDissolved()) == 1 })
	if g := l.GetDissolved()[0]; g.GetReason() != "STALE" || g.GetPosition() != 5 || g.GetFailures() != 0 {
		t.Errorf("%v", g)
	}
	s.reissue(5, 1)
	s.publish(groupOf(5, 1, 2)...)
	if got := positions(t, s.lease(3)); !reflect.DeepEqual(got, []uint64{4, 5}) {
		t.Errorf("%v", got)
	}
}

func TestDataIsNeverStaleAndNeedsNoReceipt(t *testing.T) {
	t.Parallel()
	s := setup(t)
	c := ledgerConfig()
	c.Receipts = false
	s.open(c)
	for p := range uint64(6) {
		for _, e := range groupOf(p, 0, 0) {
			e.Header.Receipt = nil
			s.publish(e)
		}
	}
	for step := range uint64(3) {
		s.commit(s.lease(step + 1))
	}
}

func TestCompletionOrderTakesWhatCameFirst(t *testing.T) {
	t.Parallel()
	s := setup(t)
	c := ledgerConfig()
	c.Order, c.MaxStaleness = bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION, 1
	s.open(c)
	s.record(0)
	total := uint64(0)
	for _, p := range []uint64{7, 4, 1, 0} {
		s.publish(groupOf(p, 0, 0)...)
		total += size
		s.samples(total)
	}
	b := s.lease(1)
	if got := positions(t, b); !reflect.DeepEqual(got, []uint64{4, 7}) {
		t.Errorf("step 1 took %v", got)
	}
	s.commit(b)
	_, err := s.client.ExcludeGroups(t.Context(), &bufferv1.ExcludeGroupsRequest{RunId: run, Groups: keys(0, 0), Reason: "X"})
	if err != nil {
		t.Fatal(err)
	}
	b = s.lease(2) // an excluded group counts, so no step waits for a group that is never issued
	if got := positions(t, b); !reflect.DeepEqual(got, []uint64{1}) || b.GetExcluded() != 1 {
		t.Errorf("step 2 took %v", got)
	}
}

// The weights of a step that are not published need no digest.
func TestAStepWithoutADigestIsCommitted(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	s.publish(append(groupOf(0, 0, 0), groupOf(1, 0, 0)...)...)
	b := s.lease(1)
	commit := &bufferv1.CommitStepRequest{RunId: run, Step: 1, BatchId: b.GetBatchId()}
	if list, err := s.client.ListSteps(t.Context(), &bufferv1.ListStepsRequest{RunId: run}); err != nil || len(list.GetSteps()) != 0 {
		t.Fatalf("steps before the commit: %v, %v", list, err)
	}
	for range 2 {
		got, err := s.client.CommitStep(t.Context(), commit)
		if err != nil || got.GetStep().GetChain() == "" {
			t.Fatalf("got %v, %v", got, err)
		}
	}
	list, err := s.client.ListSteps(t.Context(), &bufferv1.ListStepsRequest{RunId: run})
	if err != nil || len(list.GetSteps()) != 1 || list.GetSteps()[0].GetWeightsDigest() != "" {
		t.Fatalf("steps %v, %v", list, err)
	}
	l := s.until("step 1", func(l *bufferv1.LedgerState) bool { return l.GetStep() == 1 })
	if l.GetConsumed() != 2 || l.GetWeightsVersion() != 0 || l.GetWeightsDigest() != digest(0) {
		t.Errorf("the newest recorded weights are the initial ones: %v", l)
	}
	commit.WeightsDigest = digest(1)
	if _, err := s.client.CommitStep(t.Context(), commit); rpcerr.Reason(err) != "STEP_CONFLICT" {
		t.Errorf("a commit with a digest now: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	s.publish(append(groupOf(0, 0, 0), groupOf(1, 0, 0)...)...)
	b := s.lease(1)
	ctx, c := t.Context(), s.client
	other := ledgerConfig()
	other.GroupSize = 2
	commit := func(step uint64, batch, weights string) error {
		_, err := c.CommitStep(ctx, &bufferv1.CommitStepRequest{RunId: run, Step: step, BatchId: batch, WeightsDigest: weights})
		return err
	}
	open := func(run string) error {
		_, err := c.OpenLedger(ctx, &bufferv1.OpenLedgerRequest{RunId: run, Config: other})
		return err
	}
	exclude := func(position uint64, attempt uint32) error {
		_, err := c.ExcludeGroups(ctx, &bufferv1.ExcludeGroupsRequest{RunId: run, Groups: keys(position, attempt), Reason: "X"})
		return err
	}
	lease := func(run string, step uint64) error {
		_, err := c.LeaseBatch(ctx, &bufferv1.LeaseBatchRequest{RunId: run, Step: step, WaitSeconds: 10})
		return err
	}
	for _, f := range []struct {
		name, reason string
		code         codes.Code
		err          error
	}{
		{"another config", "LEDGER_CONFIG_CONFLICT", codes.FailedPrecondition, open(run)},
		{"a run that is a path", "RUN_ID_INVALID", codes.InvalidArgument, open("../x")},
		{"no ledger", "LEDGER_NOT_FOUND", codes.NotFound, lease("run-x", 1)},
		{"a step too far", "STEP_OUT_OF_ORDER", codes.FailedPrecondition, lease(run, 2)},
		{"commit of no lease", "STEP_NOT_LEASED", codes.FailedPrecondition, commit(2, b.GetBatchId(), digest(2))},
		{"commit of another batch", "STEP_CONFLICT", codes.FailedPrecondition, commit(1, digest(1), digest(1))},
		{"exclusion of a leased group", "GROUP_STATE_CONFLICT", codes.FailedPrecondition, exclude(0, 0)},
		{"commit", "", codes.OK, commit(1, b.GetBatchId(), digest(1))},
		{"commit of another digest", "STEP_CONFLICT", codes.FailedPrecondition, commit(1, b.GetBatchId(), digest(2))},
		{"exclusion of a consumed group", "GROUP_STATE_CONFLICT", codes.FailedPrecondition, exclude(1, 0)},
		{"exclusion out of range", "GROUP_OUT_OF_RANGE", codes.InvalidArgument, func() error {
			_, err := c.ExcludeGroups(ctx, &bufferv1.ExcludeGroupsRequest{RunId: run, Groups: []*bufferv1.GroupKey{{Index: 5}}, Reason: "X"})
			return err
		}()},
		{"exclusion", "", codes.OK, exclude(3, 2)},
		{"exclusion again", "", codes.OK, exclude(3, 2)},
		{"another digest of a version", "WEIGHTS_DIGEST_CONFLICT", codes.FailedPrecondition, func() error {
			_, err := c.RecordWeights(ctx, &bufferv1.RecordWeightsRequest{RunId: run, Digest: digest(3)})
			return err
		}()},
		{"no batch", "BATCH_NOT_FOUND", codes.NotFound, func() error {
			_, err := c.GetBatch(ctx, &bufferv1.GetBatchRequest{RunId: run, Step: 7})
			return err
		}()},
		{"a request against the rules", "INVALID_REQUEST", codes.InvalidArgument, commit(1, "x", "y")},
	} {
		if rpcerr.Reason(f.err) != f.reason || rpcerr.Code(f.err) != f.code {
			t.Errorf("%s: got %v, want %s %s", f.name, f.err, f.code, f.reason)
		}
	}
	s.reissue(4, 3)
	if err := exclude(4, 2); rpcerr.Reason(err) != "GROUP_ATTEMPT_CONFLICT" {
		t.Errorf("exclusion of an older attempt: %v", err)
	}
}

func TestARestoredRunBeginsAtItsSnapshot(t *testing.T) {
	t.Parallel()
	s := setup(t)
	c := ledgerConfig()
	c.FirstPosition, c.FirstStep = 6, 3
	s.open(c)
	s.record(3)
	s.publish(slices.Concat(groupOf(5, 0, 3), groupOf(6, 0, 3), groupOf(7, 0, 3))...) // 5 was consumed before the snapshot
	b := s.lease(4)
	if got := positions(t, b); !reflect.DeepEqual(got, []uint64{6, 7}) {
		t.Errorf("%v", got)
	}
	if step := s.commit(b); step.GetStep() != 4 {
		t.Errorf("%v", step)
	}
	if l := s.until("drops", func(l *bufferv1.LedgerState) bool { return l.GetDuplicates() == size }); l.GetStep() != 4 {
		t.Errorf("%v", l)
	}
}

// A forked conversation is one sample with a part for each of its ends, and a step trains on every
// part.
func TestAStepTrainsOnEveryPartOfASample(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	for position := range uint64(2) {
		group := groupOf(position, 0, 0)
		first, second := proto.CloneOf(group[0].GetHeader()), proto.CloneOf(group[0].GetHeader())
		first.Parts, second.Parts, second.Key.Part = 2, 2, 1
		s.publish(append(group[1:], seal(first), seal(second))...)
	}
	batch := s.lease(1)
	if n := len(batch.GetSamples()); n != 2*(size+1) {
		t.Errorf("%d payloads of %d samples with one more part each", n, 2*size)
	}
	s.commit(batch)
	steps, err := s.client.ListSteps(t.Context(), &bufferv1.ListStepsRequest{RunId: run})
	if err != nil || len(steps.GetSteps()) != 1 || steps.GetSteps()[0].GetSamples() != 2*(size+1) {
		t.Errorf("%v, %v", steps, err)
	}
}

// partsOfSample makes a sample of several parts.
func partsOfSample(position uint64, n, parts uint32) []*trajectoryv1.TrajectoryEnvelope {
	out := make([]*trajectoryv1.TrajectoryEnvelope, parts)
	for part := range out {
		h := proto.CloneOf(sampleOf(position, 0, n).GetHeader())
		h.Parts, h.Key.Part = parts, uint32(part)
		out[part] = seal(h)
	}
	return out
}

// A group with a sample that lacks a part must not be trained on.
func TestAGroupIsReadyWhenItsSamplesHaveAllParts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		sent          []*trajectoryv1.TrajectoryEnvelope
		ready         uint64
		refused, left uint64 // left: duplicates
	}{
		"complete":            {partsOfSample(0, 0, 3), 1, 0, 0},
		"the last is absent":  {partsOfSample(0, 0, 3)[:2], 0, 1, 0},
		"the first is absent": {partsOfSample(0, 0, 3)[1:], 0, 1, 0},
		"beyond the number":   {partsOfSample(0, 0, 2)[1:], 0, 1, 0},
		"one part twice":      {append(partsOfSample(0, 0, 2)[:1], partsOfSample(0, 0, 2)[0]), 0, 1, 0},
		// It was sampled twice, with another number of parts: the parts of two samples must not be mixed.
		"two samples": {append(partsOfSample(0, 0, 2), partsOfSample(0, 0, 3)...), 1, 0, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := setup(t)
			s.open(ledgerConfig())
			s.record(0)
			if _, err := s.put(append(groupOf(0, 0, 0)[1:], c.sent...)); err != nil {
				t.Fatal(err)
			}
			l := s.until("the group", func(l *bufferv1.LedgerState) bool { return l.GetReady()+uint64(len(l.GetDissolved())) == 1 })
			if l.GetReady() != c.ready || l.GetRefused() != c.refused || l.GetDuplicates() < c.left {
				t.Errorf("%v", l)
			}
			if c.ready == 0 && l.GetDissolved()[0].GetReason() != "PARTS_MISSING" {
				t.Errorf("it was dissolved with %s", l.GetDissolved()[0].GetReason())
			}
		})
	}
	s := setup(t) // the second one arrives later
	s.open(ledgerConfig())
	s.record(0)
	for _, parts := range []uint32{2, 3} {
		if _, err := s.put(partsOfSample(0, 0, parts)); err != nil {
			t.Fatal(err)
		}
	}
	if l := s.until("the duplicates", func(l *bufferv1.LedgerState) bool { return l.GetDuplicates() > 0 }); l.GetDuplicates() != 3 || l.GetSamples() != 2 {
		t.Errorf("%v", l)
	}
}
