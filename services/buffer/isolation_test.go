package buffer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/files"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// enough is longer than any call takes that does not wait for another run.
const enough = 20 * time.Second

// groupOfRun is a group at position 0 of another run.
func groupOfRun(id string) *trajectoryv1.TrajectoryBatch {
	batch := &trajectoryv1.TrajectoryBatch{}
	for _, e := range groupOf(0, 0, 0) {
		h := proto.CloneOf(e.GetHeader())
		h.Key.RunId = id
		batch.Trajectories = append(batch.Trajectories, seal(h))
	}
	return batch
}

// openRun opens the ledger of another run.
func (s *bench) openRun(ctx context.Context, id string) error {
	c := ledgerConfig()
	c.Receipts = false
	_, err := s.client.OpenLedger(ctx, &bufferv1.OpenLedgerRequest{RunId: id, Config: c})
	return err
}

// putRun puts a group of another run and returns the number of accepted samples.
func (s *bench) putRun(ctx context.Context, id string) (uint32, error) {
	req := &bufferv1.PutTrajectoriesRequest{RunId: id, Puts: []*trajectoryv1.TrajectoryBatch{groupOfRun(id)}}
	r, err := s.client.PutTrajectories(ctx, req)
	if err != nil {
		return 0, err
	}
	return r.GetResults()[0].GetAccepted(), nil
}

// A run whose segments cannot be opened does not keep the others from being resumed. It is resumed
// when the cause is gone.
func TestARunThatCannotBeOpenedStopsNoOther(t *testing.T) {
	t.Parallel()
	s := setup(t)
	if err := s.openRun(t.Context(), "broken"); err != nil { // the first one that is resumed
		t.Fatal(err)
	}
	s.open(ledgerConfig())
	s.record(0)
	s.stop()
	folder := filepath.Join(s.cfg.Segments, "broken")
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(folder, []byte("not a folder"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.publish(groupOf(0, 0, 0)...)
	s.publish(groupOf(1, 0, 0)...)
	s.start() // fails the test if Run returns an error
	s.commit(s.lease(1))
	if _, err := s.putRun(t.Context(), "broken"); err == nil {
		t.Error("samples of a run without a folder were accepted")
	}
	for s.events.reasons()["LEDGER_UNAVAILABLE"] != 1 {
		<-time.After(time.Millisecond)
	}
	if err := os.Remove(folder); err != nil {
		t.Fatal(err)
	}
	if n, err := s.putRun(t.Context(), "broken"); n != size || err != nil {
		t.Errorf("%d samples were accepted after the folder was fixed: %v", n, err)
	}
}

// stuck is a blob store that does not answer for runs whose id starts with "slow", until it is
// released.
type stuck struct {
	*files.Store
	listing  bool // List does not answer either
	entered  chan string
	released chan struct{}
}

func (s *stuck) wait(ctx context.Context, key string) {
	if !strings.HasPrefix(key, "segments/slow") {
		return
	}
	s.entered <- key
	select {
	case <-s.released:
	case <-ctx.Done():
	}
}

func (s *stuck) Put(ctx context.Context, key string, r io.Reader) (blob.Info, error) {
	s.wait(ctx, key)
	return s.Store.Put(ctx, key, r)
}

func (s *stuck) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	if s.listing {
		s.wait(ctx, prefix)
	}
	return s.Store.List(ctx, prefix)
}

// onStuckBucket is a buffer whose payloads are durable in a blob store that hangs for some runs.
func onStuckBucket(t *testing.T, listing bool) (*bench, *stuck) {
	t.Helper()
	s := setup(t)
	store, err := files.Open(filepath.Join(t.TempDir(), "bucket"))
	if err != nil {
		t.Fatal(err)
	}
	b := &stuck{Store: store, listing: listing, entered: make(chan string, 9), released: make(chan struct{})}
	s.stop()
	s.deps.Blobs = b
	s.start()
	return s, b
}

// Runs whose bucket hangs delay no other run: neither its ingest, nor its transactions.
func TestASlowBucketDelaysNoOtherRun(t *testing.T) {
	t.Parallel()
	s, b := onStuckBucket(t, false)
	runs := []string{"slow-1", "slow-2", "slow-3"}
	type answer struct {
		accepted uint32
		err      error
	}
	answers := make(chan answer, len(runs))
	for _, id := range append(runs, "fast") {
		if err := s.openRun(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range runs {
		go func() {
			n, err := s.putRun(t.Context(), id)
			answers <- answer{n, err}
		}()
	}
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	for range runs {
		select {
		case <-b.entered:
		case <-ctx.Done():
			close(b.released)
			t.Fatal("a run with a slow bucket waits for another")
		}
	}
	if n, err := s.putRun(ctx, "fast"); n != size || err != nil {
		t.Errorf("%d samples of the fast run were accepted: %v", n, err)
	}
	close(b.released)
	for range runs {
		if a := <-answers; a.accepted != size || a.err != nil {
			t.Errorf("%d samples of a slow run were accepted: %v", a.accepted, a.err)
		}
	}
}

// A run whose bucket hangs while its ledger is opened delays no other run, and not the end of the
// service.
func TestARunThatOpensSlowlyDelaysNoOtherRun(t *testing.T) {
	t.Parallel()
	s, b := onStuckBucket(t, true)
	opened := make(chan error, 1)
	go func() { opened <- s.openRun(t.Context(), "slow") }()
	<-b.entered
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	if err := s.openRun(ctx, "fast"); err != nil {
		t.Fatal(err)
	}
	if n, err := s.putRun(ctx, "fast"); n != size || err != nil {
		t.Errorf("%d samples of the fast run were accepted: %v", n, err)
	}
	close(b.released)
	if err := <-opened; err != nil && rpcerr.Reason(err) != "BUFFER_LEAVING" {
		t.Error(err)
	}
}

// A ledger that is closed, or was asked for and does not exist, takes no memory.
func TestAnEndedRunTakesNoMemory(t *testing.T) {
	t.Parallel()
	s := setup(t)
	const runs = 20
	for n := range runs {
		id := fmt.Sprintf("run-%d", n)
		if err := errors.Join(s.bus.EnsureRun(t.Context(), id), s.openRun(t.Context(), id)); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.server.Entries(); n != runs {
		t.Errorf("%d entries of %d open ledgers", n, runs)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	watch, err := s.client.WatchLedger(ctx, &bufferv1.WatchLedgerRequest{RunId: "run-0"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	for n := range runs {
		id := fmt.Sprintf("run-%d", n)
		if _, err := s.client.CloseLedger(t.Context(), &bufferv1.CloseLedgerRequest{RunId: id}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.putRun(t.Context(), id); rpcerr.Reason(err) != "LEDGER_CLOSED" {
			t.Errorf("put into the closed ledger of %s: %v", id, err)
		}
	}
	if n := s.server.Entries(); n > 1 {
		t.Errorf("%d entries while one closed ledger is watched", n)
	}
	cancel()
	if _, err := s.client.CloseLedger(t.Context(), &bufferv1.CloseLedgerRequest{RunId: "run-unknown"}); rpcerr.Reason(err) != "LEDGER_NOT_FOUND" {
		t.Errorf("close an unknown ledger: %v", err)
	}
	for s.server.Entries() > 0 {
		select {
		case <-t.Context().Done():
			t.Fatalf("%d entries of closed ledgers", s.server.Entries())
		case <-time.After(time.Millisecond):
		}
	}
	if err := s.openRun(t.Context(), "run-1"); err != nil {
		t.Fatal(err)
	}
	if n, err := s.putRun(t.Context(), "run-1"); n == 0 || err != nil {
		t.Errorf("put into the ledger that is open again: %d, %v", n, err)
	}
}
