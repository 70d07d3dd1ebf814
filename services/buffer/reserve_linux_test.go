package buffer_test

import (
	"testing"

	"github.com/rollout-rl/rollout/libs/disk/disktest"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// onSmallDisk is a buffer whose segments are on a file system of 4 MiB.
func onSmallDisk(t *testing.T, reserve uint64) (*bench, *disktest.Disk) {
	t.Helper()
	small := disktest.Mount(t, "4m")
	s := setup(t)
	s.stop()
	s.cfg.Segments, s.cfg.ReserveBytes = small.Dir, reserve
	s.start()
	s.open(ledgerConfig())
	s.record(0)
	return s, small
}

func stalled(l *bufferv1.LedgerState) bool { return l.GetStall().GetReason() == rpcerr.ReasonDiskFull }

// consumedOnce fails unless both groups are consumed exactly once.
func (s *bench) consumedOnce() {
	s.Helper()
	batch := s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size || len(positions(s, batch)) != 2 {
		s.Fatalf("%d payloads: %v", len(got), err)
	}
	s.commit(batch)
	state := s.until("the step", func(l *bufferv1.LedgerState) bool { return l.GetStep() == 1 })
	if state.GetDuplicates() != 0 || state.GetConsumed() != 2 || stalled(state) {
		s.Errorf("state %v", state)
	}
	if events := s.events.reasons(); events["DISK_FULL"] != 1 || events["DISK_SPACE"] != 1 {
		s.Errorf("events %v", events)
	}
}

// Ingest pauses when the reserve is reached, before a write fails, and continues when there is
// space again.
func TestReserveIsKept(t *testing.T) {
	t.Parallel()
	s, small := onSmallDisk(t, 0)
	small.Fill(200 << 10) // a tenth of 4 MiB is the reserve
	s.publish(groupOf(0, 0, 0)...)
	state := s.until("a full disk", stalled)
	// A fetch that was open when the disk filled still gets the group. A later one leaves it in the
	// stream.
	if n := state.GetSamples(); n != 0 && n != size || state.GetStall().GetEvidence() == "" {
		t.Errorf("state %v", state)
	}
	s.publish(groupOf(1, 0, 0)...)
	if waiting := s.waiting(1); waiting == "" {
		t.Error("step 1 waits for nothing")
	}
	small.Free()
	s.samples(2 * size)
	s.consumedOnce()
	if events := s.events.reasons(); events["INGEST_FAILED"] != 0 {
		t.Errorf("events %v", events)
	}
}

// A write that fails for lack of space loses nothing: the stream delivers again until it succeeds.
func TestACompletelyFullDisk(t *testing.T) {
	t.Parallel()
	s, small := onSmallDisk(t, 1)
	small.Fill(0)
	s.publish(groupOf(0, 0, 0)...)
	s.publish(groupOf(1, 0, 0)...)
	if state := s.until("a full disk", stalled); state.GetSamples() != 0 {
		t.Errorf("state %v", state)
	}
	s.restart() // samples that are not ingested are only on the stream
	s.until("a full disk after a restart", stalled)
	small.Free()
	s.samples(2 * size)
	batch := s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size || len(positions(t, batch)) != 2 {
		t.Fatalf("%d payloads: %v", len(got), err)
	}
}
