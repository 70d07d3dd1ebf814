package buffer_test

import (
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

const (
	keep    = bufferv1.OldLineage_OLD_LINEAGE_KEEP
	reissue = bufferv1.OldLineage_OLD_LINEAGE_REISSUE
	exact   = bufferv1.OldLineage_OLD_LINEAGE_UNSPECIFIED
)

// again is the digest of a version that was retrained with other bits.
func again(version uint64) string { return digest(version + 100) }

// twoSteps commits two steps on samples of version 0, and leaves group 4 with samples of version 1.
func twoSteps(t *testing.T) *bench {
	s := setup(t)
	c := ledgerConfig()
	c.MaxStaleness, c.Order = 2, bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION
	s.open(c)
	s.record(0)
	for step := range uint64(2) {
		s.publish(append(groupOf(2*step, 0, 0), groupOf(2*step+1, 0, 0)...)...)
		s.commit(s.lease(step + 1))
	}
	s.publish(groupOf(4, 0, 1)...)
	s.until("a ready group", func(l *bufferv1.LedgerState) bool { return l.GetReady() == 1 })
	return s
}

func (s *bench) retrained(version uint64, digest string, old bufferv1.OldLineage) (*bufferv1.RecordWeightsResponse, error) {
	return s.client.RecordWeights(s.Context(), &bufferv1.RecordWeightsRequest{RunId: run, Version: version, Digest: digest, OldLineage: old})
}

// sampledAgain is a group whose samples have the receipt of the retrained version.
func sampledAgain(position uint64, attempt uint32, version uint64) []*trajectoryv1.TrajectoryEnvelope {
	all := groupOf(position, attempt, version)
	for _, e := range all {
		e.Header.Receipt.Digest = again(version)
	}
	return all
}

// Version 1 is trained again with other bits. It begins a lineage, which version 2 and the next
// step continue. Samples of the lost version 1 stay valid.
func TestRetrainedWeightsBeginALineage(t *testing.T) {
	t.Parallel()
	s := twoSteps(t)
	if _, err := s.retrained(1, again(1), exact); rpcerr.Reason(err) != "WEIGHTS_DIGEST_CONFLICT" {
		t.Fatalf("a deterministic run: %v", err)
	}
	for range 2 { // the call is idempotent
		got, err := s.retrained(1, again(1), keep)
		if err != nil || got.GetLineage() != 1 {
			t.Fatalf("%v, %v", got, err)
		}
	}
	for range 2 {
		if got, err := s.retrained(2, again(2), keep); err != nil || got.GetLineage() != 1 || got.GetForked() {
			t.Fatalf("version 2 continues the lineage: %v, %v", got, err)
		}
	}
	state := s.until("the lineage", func(l *bufferv1.LedgerState) bool { return l.GetLineage() == 1 })
	if state.GetWeightsVersion() != 2 || state.GetWeightsDigest() != again(2) || state.GetReady() != 1 {
		t.Errorf("%v", state)
	}
	s.publish(append(groupOf(5, 0, 1), sampledAgain(6, 0, 2)...)...) // of a lost version, and of one that exists
	state = s.until("three ready groups", func(l *bufferv1.LedgerState) bool { return l.GetReady() == 3 })
	wrong := groupOf(7, 0, 2)
	wrong[0].Header.Receipt.Digest = digest(55) // of no lineage
	s.publish(wrong...)
	s.until("a refusal", func(l *bufferv1.LedgerState) bool { return l.GetRefused() == state.GetRefused()+1 })
	if step := s.commit(s.lease(3)); step.GetLineage() != 1 {
		t.Errorf("step 3 is of lineage %d", step.GetLineage())
	}
	s.restart()
	if got, err := s.retrained(2, digest(2), keep); err != nil || got.GetLineage() != 2 || got.GetLostDigest() != again(2) {
		t.Errorf("the second loss: %v, %v", got, err)
	}
}

// With OLD_LINEAGE_REISSUE groups with samples of lost weights are dissolved, and later ones are
// refused, which counts as no failure of the group.
func TestSamplesOfLostWeightsAreSampledAgain(t *testing.T) {
	t.Parallel()
	s := twoSteps(t)
	s.publish(groupOf(5, 0, 0)...) // of a version that was not lost
	s.until("two ready groups", func(l *bufferv1.LedgerState) bool { return l.GetReady() == 2 })
	got, err := s.retrained(1, again(1), reissue)
	if err != nil || got.GetReissued() != 1 || !got.GetForked() || got.GetLostDigest() != digest(1) {
		t.Fatalf("%v, %v", got, err)
	}
	s.publish(groupOf(6, 0, 1)...)
	state := s.until("two dissolved groups", func(l *bufferv1.LedgerState) bool { return len(l.GetDissolved()) == 2 })
	for _, g := range state.GetDissolved() {
		if g.GetReason() != "OLD_LINEAGE" || g.GetFailures() != 0 {
			t.Errorf("%v", g)
		}
	}
	s.reissue(4, 1)
	s.publish(sampledAgain(4, 1, 1)...)
	s.until("two ready groups", func(l *bufferv1.LedgerState) bool { return l.GetReady() == 2 })
}

// Only versions that a step of this run made can be lost.
func TestOnlyVersionsOfStepsAreRetrained(t *testing.T) {
	t.Parallel()
	s := twoSteps(t)
	if _, err := s.retrained(0, again(0), keep); rpcerr.Code(err) != codes.FailedPrecondition {
		t.Errorf("the initial weights: %v", err)
	}
}
