package buffer_test

import (
	"context"
	"io"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/files"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/sqlstore"
)

// heap is the number of bytes in use after a garbage collection.
func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// Groups that wait for a learner are in rows and segments: ten thousand of them use no more memory
// than a thousand.
func TestTenThousandGroupsWait(t *testing.T) { // not parallel: it measures the memory of the process
	store, err := sqlstore.Open(t.Context(), sqldb.Files(t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	s, err := buffer.New(buffer.Config{Segments: t.TempDir()}, buffer.Deps{Store: store})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	const groups, batch, most = 10_000, 500, 8 << 20
	config := &bufferv1.LedgerConfig{GroupsPerStep: groups, GroupSize: 1, Order: bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION, Rows: groups}
	if _, err := s.OpenLedger(t.Context(), &bufferv1.OpenLedgerRequest{RunId: run, Config: config}); err != nil {
		t.Fatal(err)
	}
	var early uint64
	for from := 0; from < groups; from += batch {
		var envelopes []*trajectoryv1.TrajectoryEnvelope
		for n := range batch {
			e := sampleOf(0, 0, 0)
			e.Header.Key.Epoch, e.Header.Key.Index, e.Header.GroupSize = 0, uint64(from+n), 1
			envelopes = append(envelopes, seal(e.Header))
		}
		if _, err := s.Accept(t.Context(), run, envelopes); err != nil {
			t.Fatal(err)
		}
		if from == 2*batch {
			envelopes = nil
			early = heap()
		}
	}
	if late := heap(); late > early+most {
		t.Errorf("%d KiB in use after %d groups, %d KiB after %d", early>>10, 3*batch, late>>10, groups)
	}
	got, err := s.LeaseBatch(t.Context(), &bufferv1.LeaseBatchRequest{RunId: run, Step: 1})
	if err != nil || len(got.GetBatch().GetSamples()) != groups {
		t.Fatalf("%d samples: %v", len(got.GetBatch().GetSamples()), err)
	}
}

// slow is a blob store whose first put waits until it is released.
type slow struct {
	*files.Store
	once    sync.Once
	entered chan struct{}
	through chan struct{}
}

func (s *slow) Put(ctx context.Context, key string, r io.Reader) (blob.Info, error) {
	s.once.Do(func() {
		close(s.entered)
		<-s.through
	})
	return s.Store.Put(ctx, key, r)
}

// A blob store that is slower than the ack wait of the stream gets everything once.
func TestSlowBucketGetsEverythingOnce(t *testing.T) {
	t.Parallel()
	s := setup(t)
	store, err := files.Open(filepath.Join(t.TempDir(), "bucket"))
	if err != nil {
		t.Fatal(err)
	}
	b := &slow{Store: store, entered: make(chan struct{}), through: make(chan struct{})}
	s.stop()
	s.deps.Blobs = b
	s.start()
	s.open(ledgerConfig())
	s.record(0)
	s.publish(groupOf(0, 0, 0)...)
	<-b.entered
	<-time.After(5 * time.Second) // the ack wait is 4 s
	close(b.through)
	s.publish(groupOf(1, 0, 0)...)
	s.samples(2 * size)
	s.commit(s.lease(1))
	state := s.until("the step", func(l *bufferv1.LedgerState) bool { return l.GetStep() == 1 })
	if state.GetDuplicates() != 0 {
		t.Errorf("%d samples were delivered again", state.GetDuplicates())
	}
}
