package buffer_test

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protodelim"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

const restored = "run-01jz0000000000000000000001"

// cut stores what no committed step has consumed as artifacts, and returns the config of a ledger
// that begins with it. position is where the next step begins.
func (s *bench) cut(a *artifacts, of *bufferv1.LedgerConfig, position uint64) *bufferv1.LedgerConfig {
	s.Helper()
	stream, err := s.client.CutLedger(s.Context(), &bufferv1.CutLedgerRequest{RunId: run})
	if err != nil {
		s.Fatal(err)
	}
	var rows, payloads bytes.Buffer
	c := &bufferv1.LedgerConfig{
		GroupsPerStep: of.GetGroupsPerStep(), GroupSize: of.GetGroupSize(), Order: of.GetOrder(), Rows: of.GetRows(), Receipts: of.GetReceipts(),
		GroupAttempts: of.GetGroupAttempts(), DrawBatches: of.GetDrawBatches(), MaxStaleness: of.GetMaxStaleness(),
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, ioEOF) {
			break
		}
		if err != nil {
			s.Fatal(err)
		}
		if m.GetLedger() != nil {
			c.FirstPosition, c.FirstStep = m.GetLedger().GetFirstUnconsumed(), m.GetLedger().GetState().GetStep()
			c.Carried = position - c.GetFirstPosition()
		}
		for _, p := range m.GetPayloads() {
			payloads.Write(p)
		}
		m.Payloads = nil
		if _, err := protodelim.MarshalTo(&rows, m); err != nil {
			s.Fatal(err)
		}
	}
	c.Seed = &bufferv1.LedgerSeed{Rows: a.put(rows.Bytes()), Payloads: a.put(payloads.Bytes()), RunIds: []string{run}}
	return c
}

func (s *bench) openRestored(c *bufferv1.LedgerConfig) error {
	_, err := s.client.OpenLedger(s.Context(), &bufferv1.OpenLedgerRequest{RunId: restored, Config: c})
	return err
}

// ready commits step 1 and makes the groups of step 2.
func (s *bench) ready() {
	s.Helper()
	s.open(ledgerConfig())
	s.record(0)
	s.publish(append(groupOf(0, 0, 0), groupOf(1, 0, 0)...)...)
	s.commit(s.lease(1))
	s.publish(append(groupOf(2, 0, 1), groupOf(3, 0, 1)...)...)
	s.samples(4 * size)
}

// withArtifacts restarts the buffer with a storage service.
func withArtifacts(t *testing.T) (*bench, *artifacts) {
	t.Helper()
	s, a := setup(t), &artifacts{}
	s.stop()
	s.deps.Artifacts = a
	s.start()
	return s, a
}

// The batch of a restored run is that of the run it was cut from, also if that one was leased and
// passes excluded groups before all others.
func TestARestoredRunLeasesTheSameBatch(t *testing.T) {
	t.Parallel()
	s, a := withArtifacts(t)
	c := drawing()
	c.Order = bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION
	s.open(c)
	s.record(0)
	for n, group := range [][]*trajectoryv1.TrajectoryEnvelope{groupOf(4, 0, 0), flat(0, 1), groupOf(2, 0, 0), flat(1, 0), groupOf(3, 0, 0), groupOf(5, 0, 0)} {
		s.publish(group...)
		s.samples(uint64(n+1) * size)
	}
	end := s.commit(s.lease(1)).GetEndPosition()
	want := s.lease(2) // takes 3 and 5, and passes 1
	config := s.cut(a, c, end)
	if config.GetFirstPosition() != 1 || config.GetCarried() != 2 { // 2 and 4 are consumed
		t.Errorf("the first unconsumed group is %d, and %d after it are consumed", config.GetFirstPosition(), config.GetCarried())
	}
	if err := s.openRestored(config); err != nil {
		t.Fatal(err)
	}
	got, err := s.client.LeaseBatch(t.Context(), &bufferv1.LeaseBatchRequest{RunId: restored, Step: 2})
	if err != nil || got.GetBatch() == nil {
		t.Fatal(got, err)
	}
	if b := got.GetBatch(); b.GetBatchId() != want.GetBatchId() || b.GetExcluded() != want.GetExcluded() || !reflect.DeepEqual(positions(t, b), positions(t, want)) {
		t.Errorf("the restored run leases %v with %d excluded, want %v with %d", positions(t, b), b.GetExcluded(), positions(t, want), want.GetExcluded())
	}
}

// An open episode of a snapshot may have tokens of any weights that are not too old, although no
// sample names them yet.
func TestACutHasTheWeightsOfOpenEpisodes(t *testing.T) {
	t.Parallel()
	for staleness, want := range []int{1, 2} {
		s, _ := withArtifacts(t)
		c := ledgerConfig()
		c.MaxStaleness = uint32(staleness)
		s.open(c)
		s.record(0)
		s.publish(append(groupOf(0, 0, 0), groupOf(1, 0, 0)...)...)
		s.commit(s.lease(1))
		s.record(1)
		stream, err := s.client.CutLedger(t.Context(), &bufferv1.CutLedgerRequest{RunId: run})
		if err != nil {
			t.Fatal(err)
		}
		first, err := stream.Recv()
		if err != nil || len(first.GetWeights()) != want || first.GetWeights()[want-1].GetVersion() != 1 {
			t.Errorf("with max_staleness %d: %v, want %d versions (%v)", staleness, first.GetWeights(), want, err)
		}
	}
}

// Until a ledger has the groups that it begins with, it takes no others, and its end does not
// count as its beginning.
func TestALedgerIsClosedUntilItHasItsGroups(t *testing.T) {
	t.Parallel()
	s, a := withArtifacts(t)
	s.ready()
	config := s.cut(a, ledgerConfig(), 2)
	missing := a.have[config.GetSeed().GetPayloads()]
	delete(a.have, config.GetSeed().GetPayloads())
	if err := s.openRestored(config); rpcerr.Reason(err) != "ARTIFACT_NOT_FOUND" {
		t.Fatalf("without the payloads: %v", err)
	}
	put := &bufferv1.PutTrajectoriesRequest{RunId: restored, Puts: []*trajectoryv1.TrajectoryBatch{{Trajectories: groupOf(2, 0, 0)}}}
	if _, err := s.client.PutTrajectories(t.Context(), put); rpcerr.Reason(err) != ledger.ErrClosed.Reason() {
		t.Errorf("a put: %v", err)
	}
	if _, err := s.client.CloseLedger(t.Context(), &bufferv1.CloseLedgerRequest{RunId: restored}); err != nil {
		t.Fatal(err)
	}
	other := ledgerConfig()
	other.Seed = &bufferv1.LedgerSeed{Rows: config.GetSeed().GetRows(), Payloads: config.GetSeed().GetRows()}
	if err := s.openRestored(other); rpcerr.Reason(err) != ledger.ErrConfig.Reason() {
		t.Errorf("another snapshot: %v", err)
	}
	a.put(missing)
	if err := s.openRestored(config); err != nil {
		t.Fatal(err)
	}
	got, err := s.client.LeaseBatch(t.Context(), &bufferv1.LeaseBatchRequest{RunId: restored, Step: 2})
	if err != nil || len(got.GetBatch().GetSamples()) != 2*size {
		t.Errorf("leased %d samples: %v", len(got.GetBatch().GetSamples()), err)
	}
}

// A buffer that died after the upload of a segment leaves a blob. Another host begins the ledger
// with the next number.
func TestTheBeginningOfALedgerIsRepeatedOnAnotherHost(t *testing.T) {
	t.Parallel()
	s, b := withBucket(t)
	a := &artifacts{}
	s.stop()
	s.deps.Artifacts = a
	s.start()
	s.ready()
	config := s.cut(a, ledgerConfig(), 2)
	if _, err := b.Put(t.Context(), "segments/"+restored+"/000001.seg", bytes.NewReader([]byte("of a buffer that died"))); err != nil {
		t.Fatal(err)
	}
	if err := s.openRestored(config); err != nil {
		t.Fatal(err)
	}
	s.moved()
	got, err := s.client.LeaseBatch(t.Context(), &bufferv1.LeaseBatchRequest{RunId: restored, Step: 2})
	if err != nil || len(got.GetBatch().GetSamples()) != 2*size {
		t.Errorf("leased %d samples: %v", len(got.GetBatch().GetSamples()), err)
	}
}

// A row of an imported snapshot may name any length and any state.
func TestALyingRowOfASnapshotIsRefused(t *testing.T) {
	t.Parallel()
	s, a := withArtifacts(t)
	s.ready()
	config := s.cut(a, ledgerConfig(), 2)
	for what, m := range map[string]*bufferv1.CutLedgerResponse{
		"a length beyond the file":  {Samples: []*bufferv1.SampleRecord{{Ref: &bufferv1.SampleRef{Length: 4<<30 - 1}}}},
		"a length beyond all files": {Samples: []*bufferv1.SampleRecord{{Ref: &bufferv1.SampleRef{Length: 1 << 63}}}},
		"a state":                   {Groups: []*bufferv1.GroupRecord{{State: 77}}},
	} {
		var rows bytes.Buffer
		if _, err := protodelim.MarshalTo(&rows, m); err != nil {
			t.Fatal(err)
		}
		config.Seed.Rows = a.put(append(rows.Bytes(), bytes.Repeat([]byte{0}, 10)...)) // empty messages
		if err := s.openRestored(config); err == nil || rpcerr.Reason(err) == rpcerr.ReasonPanic {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := s.client.DeleteRun(t.Context(), &bufferv1.DeleteRunRequest{RunId: restored}); err != nil {
			t.Fatal(err)
		}
	}
}

// endless is a storage service whose downloads do not end.
type endless struct {
	artifacts
	begun chan struct{}
}

func (d *endless) GetArtifact(ctx context.Context, _ *storagev1.GetArtifactRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[storagev1.GetArtifactResponse], error) {
	d.begun <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

// A buffer that loses the lead does not wait for the download of a snapshot.
func TestADownloadEndsWithTheBuffer(t *testing.T) {
	t.Parallel()
	s, a := withArtifacts(t)
	s.ready()
	config := s.cut(a, ledgerConfig(), 2)
	s.stop()
	hangs := &endless{begun: make(chan struct{}, 1)}
	s.deps.Artifacts = hangs
	s.start()
	opened := make(chan error, 1)
	go func() {
		_, err := s.server.OpenLedger(context.Background(), &bufferv1.OpenLedgerRequest{RunId: restored, Config: config})
		opened <- err
	}()
	<-hangs.begun
	s.server.Stop()
	select {
	case err := <-opened:
		if rpcerr.Reason(err) != "BUFFER_LEAVING" {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the download does not end")
	}
}
