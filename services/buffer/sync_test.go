package buffer_test

import (
	"errors"
	"os"
	"sync/atomic"
	"testing"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// syncing restarts the buffer with another way to make segments durable.
func (s *bench) syncing(sync func(*os.File) error) {
	s.Helper()
	s.stop()
	s.sync = sync
	s.start()
}

// No row names a payload before its segment is synced, and no put is answered before.
func TestRowsAreCommittedAfterTheSyncOfTheSegment(t *testing.T) {
	t.Parallel()
	s := ready(t)
	var syncs atomic.Int64
	s.syncing(func(f *os.File) error {
		syncs.Add(1)
		if info, err := f.Stat(); err != nil || info.Size() < size*400 {
			t.Errorf("synced before the records were written: %v, %v", info, err)
		}
		if got := s.export(); len(got.GetSamples()) != 0 {
			t.Errorf("%d samples before the segment is durable", len(got.GetSamples()))
		}
		return nil
	})
	s.mustPut(groupOf(0, 0, 0))
	if syncs.Load() != 1 {
		t.Errorf("%d syncs of one put", syncs.Load())
	}
	s.samples(size)
}

// A put whose segment cannot be synced is not accepted. The next one goes to another file.
func TestASegmentThatCannotBeSyncedCountsForNothing(t *testing.T) {
	t.Parallel()
	s := ready(t)
	var broken atomic.Bool
	s.syncing(func(*os.File) error {
		if broken.Load() {
			return errors.New("the disk is gone")
		}
		return nil
	})
	s.mustPut(groupOf(0, 0, 0))
	broken.Store(true)
	if _, err := s.put(groupOf(1, 0, 0)); rpcerr.Reason(err) != "INGEST_FAILED" {
		t.Errorf("%v", err)
	}
	broken.Store(false)
	if got := s.export(); len(got.GetSamples()) != size {
		t.Errorf("%d samples", len(got.GetSamples()))
	}
	s.mustPut(groupOf(1, 0, 0))
	batch := s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Errorf("%d payloads, %v", len(got), err)
	}
	if samples := batch.GetSamples(); samples[0].GetSegment() == samples[size].GetSegment() {
		t.Error("the segment that failed is still written to")
	}
}
