package buffer_test

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// syncing restarts the buffer with another way to make segments durable.
func (s *bench) syncing(sync func(*os.File) error) {
	s.Helper()
	s.stop()
	s.sync = sync
	s.start()
}

// No row names a payload before its lent file is synced, no put is answered before, and nobody else's change of the ledger waits for that.
func TestRowsFollowTheSyncOfALentFile(t *testing.T) {
	t.Parallel()
	s := ready(t)
	var syncs atomic.Int64
	s.syncing(func(f *os.File) error {
		syncs.Add(1)
		if info, err := f.Stat(); err != nil || info.Size() < size*400 {
			t.Errorf("synced before the records are in it: %v, %v", info, err)
		}
		if got := s.export(); len(got.GetSamples()) != 0 {
			t.Errorf("%d samples before their file is durable", len(got.GetSamples()))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // longer than any change takes, unless it waits for this one
		defer cancel()
		if _, err := s.client.RecordWeights(ctx, &bufferv1.RecordWeightsRequest{RunId: run, Version: 1, Digest: digest(1)}); err != nil {
			t.Error(err)
		}
		return nil
	})
	s.mustPut(s.writeInto(s.lend(), groupOf(0, 0, 0)))
	if syncs.Load() != 1 {
		t.Errorf("%d syncs of one put", syncs.Load())
	}
	s.samples(size)
}

// Of a put whose lent file can't be synced nothing counts, and nothing that was written to that file before or after.
func TestALentFileThatCannotBeSyncedCountsForNothing(t *testing.T) {
	t.Parallel()
	s := ready(t)
	var broken atomic.Bool
	s.syncing(func(*os.File) error {
		if broken.Load() {
			return errors.New("the disk is gone")
		}
		return nil
	})
	lent := s.lend()
	s.mustPut(s.writeInto(lent, groupOf(0, 0, 0)))
	broken.Store(true)
	lost := s.writeInto(lent, groupOf(1, 0, 0))
	if _, err := s.put(lost); rpcerr.Reason(err) != "INGEST_FAILED" {
		t.Errorf("%v", err)
	}
	broken.Store(false)
	if _, err := s.put(lost); rpcerr.Reason(err) != "SEGMENT_NOT_LENT" {
		t.Errorf("the file is used on: %v", err)
	}
	if got := s.export(); len(got.GetSamples()) != size {
		t.Errorf("%d samples", len(got.GetSamples()))
	}
	s.mustPut(s.writeInto(s.lend(), groupOf(1, 0, 0)))
	s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Errorf("%d payloads, %v", len(got), err)
	}
}
