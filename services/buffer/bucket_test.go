package buffer_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/files"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/sqlstore"
)

// bucket is a blob store that can refuse puts.
type bucket struct {
	*files.Store
	refuse atomic.Int64 // number of puts to refuse
}

func (b *bucket) Put(ctx context.Context, key string, r io.Reader) (blob.Info, error) {
	if b.refuse.Add(-1) >= 0 {
		return blob.Info{}, blob.ErrUnavailable
	}
	return b.Store.Put(ctx, key, r)
}

func (b *bucket) keys(t *testing.T) (out []string) {
	t.Helper()
	for info, err := range b.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, filepath.Base(info.Key))
	}
	return out
}

// withBucket is a buffer whose payloads are durable in a blob store.
func withBucket(t *testing.T) (*bench, *bucket) {
	t.Helper()
	s := setup(t)
	store, err := files.Open(filepath.Join(t.TempDir(), "bucket"))
	if err != nil {
		t.Fatal(err)
	}
	b := &bucket{Store: store}
	s.stop()
	s.deps.Blobs = b
	s.start()
	s.open(ledgerConfig())
	s.record(0)
	return s, b
}

// moved restarts the buffer with an empty disk.
func (s *bench) moved() {
	s.Helper()
	s.stop()
	s.cfg.Segments = s.TempDir()
	s.start()
}

func TestAnotherHostReadsEverything(t *testing.T) {
	t.Parallel()
	s, _ := withBucket(t)
	s.publish(groupOf(0, 0, 0)...)
	s.samples(size)
	s.moved()
	s.publish(groupOf(1, 0, 0)...)
	s.samples(2 * size)
	s.moved()
	b := s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Fatalf("%d payloads: %v", len(got), err)
	}
	s.commit(b)
	if got := s.events.reasons(); len(got) > 0 {
		t.Errorf("events %v", got)
	}
}

func TestNothingIsAckedThatIsNotInTheBucket(t *testing.T) {
	t.Parallel()
	s, b := withBucket(t)
	b.refuse.Store(2)
	s.publish(groupOf(0, 0, 0)...)
	s.samples(size) // the stream delivers again until the bucket accepts it
	if n := b.refuse.Load(); n >= 0 {
		t.Errorf("%d injected failures remain", n)
	}
	s.publish(groupOf(1, 0, 0)...)
	s.moved()
	s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Fatalf("%d payloads: %v", len(got), err)
	}
	state := s.until("all", func(l *bufferv1.LedgerState) bool { return l.GetSamples() == 2*size })
	if state.GetDuplicates() > 0 {
		t.Errorf("%d duplicates", state.GetDuplicates())
	}
}

func TestDamagedCacheIsFetchedAgain(t *testing.T) {
	t.Parallel()
	s, _ := withBucket(t)
	s.publish(append(groupOf(0, 0, 0), groupOf(1, 0, 0)...)...)
	path := s.lease(1).GetSamples()[0].GetSegment()
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, damaged := range map[string][]byte{"flipped": append(append([]byte{}, file[:40]...), flip(file[40:])...), "cut": file[:60], "gone": nil} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if damaged != nil {
			if err := os.WriteFile(path, damaged, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := s.payloads(1); err != nil || len(got) != 2*size {
			t.Errorf("%s: %d payloads: %v", name, len(got), err)
		}
	}
}

// An export downloads segments that are missing or damaged in the cache, and reports those that the
// bucket lacks too.
func TestExportReadsTheBucket(t *testing.T) {
	t.Parallel()
	s, b := withBucket(t)
	s.publish(groupOf(0, 0, 0)...)
	s.samples(size)
	s.publish(groupOf(1, 0, 0)...)
	s.samples(2 * size)
	store, err := sqlstore.Open(t.Context(), sqldb.Files(filepath.Join(s.folder, "db")))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	cache := filepath.Join(s.TempDir(), "cache")
	export := func() (flaws []string, samples int) {
		t.Helper()
		from := buffer.Payloads{Folder: filepath.Join(cache, run), Blobs: b}
		if err := buffer.Export(t.Context(), store, run, from, func(rows *bufferv1.ExportLedgerResponse) error {
			for _, g := range rows.GetSegments() {
				if g.GetMissing() || g.GetFlaw() != "" {
					flaws = append(flaws, fmt.Sprint(g.GetNumber(), g.GetMissing(), g.GetFlaw()))
				}
			}
			for _, sample := range rows.GetSamples() {
				if sample.GetFlaw() == "" {
					samples++
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return flaws, samples
	}
	for _, what := range []string{"no folder", "damaged"} {
		if flaws, samples := export(); len(flaws) > 0 || samples != 2*size {
			t.Errorf("%s: %v, %d samples", what, flaws, samples)
		}
		if err := os.WriteFile(filepath.Join(cache, run, "000001.seg"), []byte("damaged"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cache = filepath.Join(s.TempDir(), "another")
	for info, err := range b.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Delete(t.Context(), info.Key); err != nil {
			t.Fatal(err)
		}
	}
	if flaws, samples := export(); len(flaws) != 2 || samples > 0 {
		t.Errorf("of an empty bucket: %v, %d samples", flaws, samples)
	}
}

func flip(b []byte) []byte {
	b = append([]byte{}, b...)
	b[0] ^= 1
	return b
}

// A number that another buffer used before it died or was replaced is not used again. The next trim
// deletes its blob.
func TestForeignSegmentsAreLeftAlone(t *testing.T) {
	t.Parallel()
	s, b := withBucket(t)
	s.stop()
	key := "segments/" + run + "/000001.seg"
	if _, err := b.Store.Put(t.Context(), key, strings.NewReader("of a buffer that died")); err != nil {
		t.Fatal(err)
	}
	s.start()
	s.step(1, append(groupOf(0, 0, 0), groupOf(1, 0, 0)...))
	late := strings.Replace(key, "1.seg", "3.seg", 1) // refused once, then stored with another number
	if _, err := b.Store.Put(t.Context(), late, strings.NewReader("of one that was late")); err != nil {
		t.Fatal(err)
	}
	s.step(2, append(groupOf(2, 0, 1), groupOf(3, 0, 1)...))
	if _, err := s.client.TrimPayloads(t.Context(), &bufferv1.TrimPayloadsRequest{RunId: run, ThroughStep: 2}); err != nil {
		t.Fatal(err)
	}
	if left := b.keys(t); len(left) != 1 || left[0] != "000004.seg" {
		t.Errorf("remaining after the trim: %v", left)
	}
}

// step publishes, leases, reads, and commits.
func (s *bench) step(step uint64, samples []*trajectoryv1.TrajectoryEnvelope) {
	s.Helper()
	s.publish(samples...)
	b := s.lease(step)
	if got, err := s.payloads(step); err != nil || len(got) != len(samples) {
		s.Fatalf("step %d: %d payloads: %v", step, len(got), err)
	}
	s.commit(b)
}
