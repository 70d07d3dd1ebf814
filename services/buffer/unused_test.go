package buffer_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// large moves the payloads of samples to the storage service, as a worker does above 256 KiB.
func large(stored *artifacts, group []*trajectoryv1.TrajectoryEnvelope) []*trajectoryv1.TrajectoryEnvelope {
	for _, e := range group {
		e.PayloadRef, e.Payload = stored.put(e.GetPayload()), nil
	}
	return group
}

// left waits until so many artifacts are left.
func (s *bench) left(stored *artifacts, want int) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for stored.count() != want {
		select {
		case <-ctx.Done():
			s.Fatalf("%d artifacts are left, want %d", stored.count(), want)
		case <-tick.C:
		}
	}
}

// Payloads in the storage service are deleted with their groups, also after a failure.
func TestLargePayloadsAreDeletedWithTheirGroups(t *testing.T) {
	t.Parallel()
	stored := &artifacts{}
	s := setup(t)
	s.deps.Artifacts = stored
	s.restart()
	s.open(ledgerConfig())
	s.record(0)
	for position := range uint64(2) {
		s.publish(large(stored, groupOf(position, 0, 0))...)
	}
	s.commit(s.lease(1))
	again := large(stored, groupOf(0, 0, 0)) // a duplicate: its payload is that of a sample
	s.publish(again...)
	for position := uint64(2); position < 4; position++ {
		s.publish(large(stored, groupOf(position, 0, 1))...)
	}
	s.lease(2)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size || stored.count() != 4*size {
		t.Fatalf("%d payloads, %d artifacts, %v", len(got), stored.count(), err)
	}
	stored.setAway(true)
	if _, err := s.client.TrimPayloads(t.Context(), &bufferv1.TrimPayloadsRequest{RunId: run, ThroughStep: 1}); err != nil {
		t.Fatal(err) // the storage service being away delays no trim
	}
	s.stop()
	stored.setAway(false)
	s.start()
	s.left(stored, 2*size)
	if got, err := s.payloads(2); err != nil || len(got) != 2*size {
		t.Errorf("the leased step: %d payloads, %v", len(got), err)
	}
}

// A dissolved group frees its payloads without a trim.
func TestPayloadsOfADissolvedGroupAreDeleted(t *testing.T) {
	t.Parallel()
	stored := &artifacts{}
	s := setup(t)
	s.deps.Artifacts = stored
	s.restart()
	s.open(ledgerConfig())
	s.record(0)
	s.publish(large(stored, groupOf(0, 0, 0)[:2])...)
	s.publish(failed(sampleOf(0, 0, 2), trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, "WORKER_LOST"))
	s.left(stored, 0)
}

func TestDeleteRun(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	s.publish(groupOf(0, 0, 0)...)
	s.publish(groupOf(1, 0, 0)...)
	s.commit(s.lease(1))
	folder := filepath.Join(s.cfg.Segments, run)
	if files, err := os.ReadDir(folder); err != nil || len(files) == 0 {
		t.Fatalf("%d segments, %v", len(files), err)
	}
	for range 2 {
		if _, err := s.client.DeleteRun(t.Context(), &bufferv1.DeleteRunRequest{RunId: run}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(folder); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the segments: %v", err)
	}
	if _, err := s.client.ListSteps(t.Context(), &bufferv1.ListStepsRequest{RunId: run}); rpcerr.Reason(err) != "LEDGER_NOT_FOUND" {
		t.Errorf("the ledger: %v", err)
	}
	if _, err := s.client.OpenLedger(t.Context(), &bufferv1.OpenLedgerRequest{RunId: run, Config: ledgerConfig()}); rpcerr.Reason(err) != "RUN_DELETED" {
		t.Errorf("a ledger of the deleted run: %v", err)
	}
}
