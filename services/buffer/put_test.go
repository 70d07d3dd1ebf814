package buffer_test

import (
	"fmt"
	"testing"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// put puts groups in one call, one put per group.
func (s *bench) put(groups ...[]*trajectoryv1.TrajectoryEnvelope) ([]*bufferv1.PutResult, error) {
	req := &bufferv1.PutTrajectoriesRequest{RunId: run}
	for _, g := range groups {
		req.Puts = append(req.Puts, &trajectoryv1.TrajectoryBatch{Trajectories: g})
	}
	r, err := s.client.PutTrajectories(s.Context(), req)
	return r.GetResults(), err
}

func (s *bench) mustPut(groups ...[]*trajectoryv1.TrajectoryEnvelope) []*bufferv1.PutResult {
	s.Helper()
	results, err := s.put(groups...)
	if err != nil {
		s.Fatal(err)
	}
	return results
}

func ready(t testing.TB) *bench {
	t.Helper()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	return s
}

func TestAPutIsDurableWhenItReturns(t *testing.T) {
	t.Parallel()
	s := ready(t)
	results := s.mustPut(groupOf(0, 0, 0), groupOf(1, 0, 0)[:1])
	if len(results) != 2 || results[0].GetAccepted() != size || results[1].GetAccepted() != 1 {
		t.Fatalf("%v", results)
	}
	s.restart()
	again := s.mustPut(groupOf(0, 0, 0), groupOf(1, 0, 0))
	if again[0].GetDuplicates() != size || again[1].GetDuplicates() != 1 || again[1].GetAccepted() != size-1 {
		t.Errorf("%v", again)
	}
	batch := s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Errorf("%d payloads, %v", len(got), err)
	}
	s.commit(batch)
}

func TestEachPutHasItsResult(t *testing.T) {
	t.Parallel()
	s := ready(t)
	spoiled := groupOf(1, 0, 0)
	spoiled[2].Crc32C++
	broken := groupOf(2, 0, 0)
	failed(broken[1], trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, "REWARD_TIMEOUT")
	results := s.mustPut(groupOf(0, 0, 0), spoiled, broken[:2])
	refused := results[1].GetRefused()
	if results[0].GetAccepted() != size || len(refused) != 1 || refused[0].GetTrajectory() != 2 || refused[0].GetReason() != "PAYLOAD_CORRUPT" {
		t.Errorf("%v", results)
	}
	if results[2].GetFailed() != 1 {
		t.Errorf("%v", results[2])
	}
}

// leftOut makes a sample one that failed and may be left out of its group. It has a payload.
func leftOut(e *trajectoryv1.TrajectoryEnvelope) {
	e.Header.Outcome, e.Header.Reason, e.Header.LeftOut = trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, "ENVIRONMENT_TIMEOUT", true
}

func smallerGroups(least uint32) *bufferv1.LedgerConfig {
	c := ledgerConfig()
	c.MinGroupSize = least
	return c
}

// The samples of a group may arrive in several messages, so the ledger counts the usable ones.
func TestAGroupWithTooFewUsableSamplesIsDissolved(t *testing.T) {
	t.Parallel()
	for least, failures := range map[uint32]int{0: 1, size: 1, 3: 2, 1: size} {
		t.Run(fmt.Sprint(least), func(t *testing.T) {
			t.Parallel()
			s := setup(t)
			s.open(smallerGroups(least))
			s.record(0)
			group := groupOf(0, 0, 0)
			for n, e := range group[:failures] {
				leftOut(e)
				result := s.mustPut(group[n : n+1])[0]
				if last := n+1 == failures; result.GetFailed() != 1 || (result.GetAccepted() == 0) != last {
					t.Fatalf("failure %d: %v", n+1, result)
				}
			}
			l := s.until("the dissolved group", func(l *bufferv1.LedgerState) bool { return len(l.GetDissolved()) == 1 })
			if g := l.GetDissolved()[0]; g.GetReason() != "ENVIRONMENT_TIMEOUT" || g.GetSamples() != 0 {
				t.Errorf("%v", g)
			}
		})
	}
}

// A failed sample that is left out completes its group instead of dissolving it, and its payload is
// stored, because the step reads all payloads of its batch.
func TestAGroupIsCompleteWithoutASampleThatIsLeftOut(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(smallerGroups(3))
	s.record(0)
	smaller := groupOf(0, 0, 0)
	leftOut(smaller[1])
	results := s.mustPut(smaller, groupOf(1, 0, 0))
	if results[0].GetAccepted() != size || results[0].GetFailed() != 1 {
		t.Errorf("%v", results[0])
	}
	if again := s.mustPut(smaller)[0]; again.GetDuplicates() != size {
		t.Errorf("again: %v", again)
	}
	if batch := s.lease(1); len(batch.GetSamples()) != 2*size {
		t.Errorf("%d samples", len(batch.GetSamples()))
	}
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Errorf("%d payloads, %v", len(got), err)
	}
}

func TestPutsWithABucket(t *testing.T) {
	t.Parallel()
	s, _ := withBucket(t)
	s.mustPut(groupOf(0, 0, 0), groupOf(1, 0, 0))
	s.moved()
	s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Errorf("%d payloads, %v", len(got), err)
	}
}

func TestPutsToAClosedLedgerAreRefused(t *testing.T) {
	t.Parallel()
	s := setup(t)
	if _, err := s.put(groupOf(0, 0, 0)); rpcerr.Reason(err) != "LEDGER_NOT_FOUND" {
		t.Errorf("no ledger: %v", err)
	}
	s.open(ledgerConfig())
	if _, err := s.client.CloseLedger(t.Context(), &bufferv1.CloseLedgerRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.put(groupOf(0, 0, 0)); rpcerr.Reason(err) != "LEDGER_CLOSED" {
		t.Errorf("closed: %v", err)
	}
}
