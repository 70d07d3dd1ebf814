package buffer_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/segment"
	"github.com/rollout-rl/rollout/services/buffer/sqlstore"
)

const (
	run  = "run-01jz0000000000000000000000"
	size = 4 // samples per group
)

// digest is the digest of a weights version in these tests.
func digest(version uint64) string { return fmt.Sprintf("blake3-%064x", version+1) }

// bench is a NATS server, a state folder, and a buffer that can be restarted.
type bench struct {
	testing.TB
	folder string
	bus    *bus.Bus
	cfg    buffer.Config
	deps   buffer.Deps
	events *recorder
	sync   func(*os.File) error // of segments; nil: fdatasync
	stop   func()
	server *buffer.Server
	client bufferv1.BufferServiceClient
}

type recorder struct {
	mu     sync.Mutex
	events []*eventv1.Event
}

func (r *recorder) Emit(e *eventv1.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

// reasons counts the events so far by reason.
func (r *recorder) reasons() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := map[string]int{}
	for _, e := range r.events {
		out[e.GetAttributes()["reason"]]++
	}
	return out
}

func setup(t testing.TB) *bench {
	t.Helper()
	folder := t.TempDir()
	nats, err := bus.StartEmbedded(filepath.Join(folder, "nats"), bus.EmbeddedOptions{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nats.Stop)
	b, err := bus.Connect(t.Context(), bus.Options{URL: nats.URL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	if err := b.EnsureRun(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	s := &bench{TB: t, folder: folder, bus: b, events: &recorder{}, cfg: buffer.Config{Segments: filepath.Join(folder, "segments"), SegmentBytes: 8 << 10}}
	s.start()
	t.Cleanup(func() { s.stop() })
	return s
}

// start serves the buffer as rolloutd does: rpc.Server with its interceptors, in memory.
func (s *bench) start() {
	s.Helper()
	store, err := sqlstore.Open(s.Context(), sqldb.Files(filepath.Join(s.folder, "db")))
	if err != nil {
		s.Fatal(err)
	}
	deps := s.deps
	deps.Store, deps.Bus, deps.Events, deps.Datasync = store, s.bus, s.events, s.sync
	server, err := buffer.New(s.cfg, deps)
	if err != nil {
		s.Fatal(err)
	}
	edge, err := rpc.NewServer(rpc.ServerOptions{Drain: 2 * time.Second})
	if err != nil {
		s.Fatal(err)
	}
	server.Register(edge)
	s.server = server
	dialer := rpc.NewDialer(rpc.DialerOptions{Local: edge, Hosted: []string{"buffer"}})
	conn, err := dialer.Conn("buffer")
	if err != nil {
		s.Fatal(err)
	}
	s.client = bufferv1.NewBufferServiceClient(conn)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, part := range []func(context.Context) error{server.Run, edge.Run} {
		wg.Go(func() {
			if err := part(ctx); err != nil {
				s.Error(err)
			}
		})
	}
	s.stop = func() {
		s.stop = func() {}
		if err := dialer.Close(); err != nil {
			s.Error(err)
		}
		cancel()
		wg.Wait()
		if err := store.Close(); err != nil {
			s.Error(err)
		}
	}
}

func (s *bench) restart() {
	s.Helper()
	s.stop()
	s.start()
}

func ledgerConfig() *bufferv1.LedgerConfig {
	return &bufferv1.LedgerConfig{
		GroupsPerStep: 2, GroupSize: size, Order: bufferv1.LeaseOrder_LEASE_ORDER_POSITION, Rows: 5, Receipts: true, GroupAttempts: 3,
	}
}

func (s *bench) open(c *bufferv1.LedgerConfig) {
	s.Helper()
	if _, err := s.client.OpenLedger(s.Context(), &bufferv1.OpenLedgerRequest{RunId: run, Config: c}); err != nil {
		s.Fatal(err)
	}
}

func (s *bench) record(version uint64) {
	s.Helper()
	_, err := s.client.RecordWeights(s.Context(), &bufferv1.RecordWeightsRequest{RunId: run, Version: version, Digest: digest(version)})
	if err != nil {
		s.Fatal(err)
	}
}

// sampleOf is a valid sample of weights version 0.
func sampleOf(position uint64, attempt, n uint32) *trajectoryv1.TrajectoryEnvelope {
	key := &trajectoryv1.TrajectoryKey{RunId: run, Epoch: uint32(position / 5), Index: position % 5, Attempt: attempt, Sample: n}
	return seal(&trajectoryv1.TrajectoryHeader{
		Key: key, GroupSize: size, Outcome: trajectoryv1.Outcome_OUTCOME_COMPLETED, Reward: float64(n),
		Receipt: &weightsv1.WeightsReceipt{Digest: digest(0)}, WorkerId: "inference-0",
	})
}

func seal(h *trajectoryv1.TrajectoryHeader) *trajectoryv1.TrajectoryEnvelope {
	spans := []*trajectoryv1.VersionSpan{{Version: h.GetMinVersion(), End: 100}}
	payload, err := proto.Marshal(&trajectoryv1.Trajectory{Key: h.GetKey(), TokenIds: make([]byte, 400), Reward: h.GetReward(), VersionSpans: spans})
	if err != nil {
		panic(err)
	}
	return &trajectoryv1.TrajectoryEnvelope{Header: h, Payload: payload, Crc32C: segment.CRC(payload)}
}

func ofVersion(e *trajectoryv1.TrajectoryEnvelope, version uint64) *trajectoryv1.TrajectoryEnvelope {
	e.Header.MinVersion, e.Header.MaxVersion = version, version
	e.Header.Receipt = &weightsv1.WeightsReceipt{Version: version, Digest: digest(version)}
	return e
}

func failed(e *trajectoryv1.TrajectoryEnvelope, outcome trajectoryv1.Outcome, reason string) *trajectoryv1.TrajectoryEnvelope {
	e.Header.Outcome, e.Header.Reason, e.Payload = outcome, reason, nil
	return e
}

// groupOf is all samples of a group.
func groupOf(position uint64, attempt uint32, version uint64) (out []*trajectoryv1.TrajectoryEnvelope) {
	for n := range uint32(size) {
		out = append(out, ofVersion(sampleOf(position, attempt, n), version))
	}
	return out
}

func (s *bench) publish(trajectories ...*trajectoryv1.TrajectoryEnvelope) {
	s.Helper()
	err := s.bus.PublishProto(s.Context(), names.TrajSubject(run), &trajectoryv1.TrajectoryBatch{Trajectories: trajectories})
	if err != nil {
		s.Fatal(err)
	}
}

// until watches the ledger until want returns true.
func (s *bench) until(what string, want func(*bufferv1.LedgerState) bool) *bufferv1.LedgerState {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), 2*time.Minute)
	defer cancel()
	stream, err := s.client.WatchLedger(ctx, &bufferv1.WatchLedgerRequest{RunId: run})
	if err != nil {
		s.Fatal(err)
	}
	var last *bufferv1.LedgerState
	for {
		m, err := stream.Recv()
		if err != nil {
			s.Fatalf("wait for %s: %v; the last state was %v", what, err, last)
		}
		if last = m.GetState(); want(last) {
			return last
		}
	}
}

func (s *bench) samples(n uint64) {
	s.Helper()
	s.until(fmt.Sprintf("%d samples", n), func(l *bufferv1.LedgerState) bool { return l.GetSamples() == n })
}

func (s *bench) lease(step uint64) *bufferv1.Batch {
	s.Helper()
	r, err := s.client.LeaseBatch(s.Context(), &bufferv1.LeaseBatchRequest{RunId: run, Step: step, WaitSeconds: 20})
	if err != nil {
		s.Fatal(err)
	}
	if r.GetBatch() == nil {
		s.Fatalf("step %d waits for %v", step, r.GetWaits())
	}
	return r.GetBatch()
}

func (s *bench) waiting(step uint64) string {
	s.Helper()
	r, err := s.client.LeaseBatch(s.Context(), &bufferv1.LeaseBatchRequest{RunId: run, Step: step})
	if err != nil {
		s.Fatal(err)
	}
	if r.GetBatch() != nil {
		s.Fatalf("step %d has a batch already", step)
	}
	var waits []string
	for _, w := range r.GetWaits() {
		if w.GetOwner() == "" || w.GetReason() == "" {
			s.Fatalf("incomplete: %v", w)
		}
		waits = append(waits, w.GetEvidence())
	}
	return strings.Join(waits, "; ")
}

func (s *bench) commit(b *bufferv1.Batch) *bufferv1.StepRecord {
	s.Helper()
	r, err := s.client.CommitStep(s.Context(), &bufferv1.CommitStepRequest{RunId: run, Step: b.GetStep(), BatchId: b.GetBatchId(), WeightsDigest: digest(b.GetStep())})
	if err != nil {
		s.Fatal(err)
	}
	return r.GetStep()
}

func (s *bench) reissue(position uint64, attempt uint32) {
	s.Helper()
	_, err := s.client.ReissueGroups(s.Context(), &bufferv1.ReissueGroupsRequest{RunId: run, Groups: keys(position, attempt)})
	if err != nil {
		s.Fatal(err)
	}
}

func keys(position uint64, attempt uint32) []*bufferv1.GroupKey {
	return []*bufferv1.GroupKey{{Epoch: uint32(position / 5), Index: position % 5, Attempt: attempt}}
}

// payloads reads the payloads of a step with ReadPayloads.
func (s *bench) payloads(step uint64) (out []*trajectoryv1.Trajectory, err error) {
	stream, err := s.client.ReadPayloads(s.Context(), &bufferv1.ReadPayloadsRequest{RunId: run, Step: step})
	if err != nil {
		return nil, err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return out, ignoreEOF(err)
		}
		for _, p := range m.GetPayloads() {
			t := &trajectoryv1.Trajectory{}
			if err := proto.Unmarshal(p, t); err != nil {
				return nil, err
			}
			out = append(out, t)
		}
	}
}

// positions lists the positions of a batch. The samples of each group must be in order.
func positions(t testing.TB, b *bufferv1.Batch) (out []uint64) {
	t.Helper()
	last, lastSample := uint64(math.MaxUint64), uint32(0)
	for _, ref := range b.GetSamples() {
		p := uint64(ref.GetKey().GetEpoch())*5 + ref.GetKey().GetIndex()
		if p != last {
			out = append(out, p)
		} else if ref.GetKey().GetSample() <= lastSample {
			t.Errorf("samples of position %d out of order", p)
		}
		last, lastSample = p, ref.GetKey().GetSample()
	}
	return out
}

func ignoreEOF(err error) error {
	if errors.Is(err, ioEOF) {
		return nil
	}
	return err
}
