package buffer_test

import (
	"context"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/sqlstore"
)

// reads counts the samples that are read in transactions that write.
type reads struct {
	buffer.Store
	rows atomic.Int64
}

type readTx struct {
	buffer.Tx
	reads *reads
}

func (r *reads) Update(ctx context.Context, run string, fn func(buffer.Tx) error) error {
	return r.Store.Update(ctx, run, func(tx buffer.Tx) error { return fn(readTx{tx, r}) })
}

func (r *reads) UpdateLogged(ctx context.Context, run string, fn func(buffer.Tx) error) error {
	return r.Store.UpdateLogged(ctx, run, func(tx buffer.Tx) error { return fn(readTx{tx, r}) })
}

func (t readTx) Samples(ctx context.Context, positions []uint64) ([]buffer.Sample, error) {
	out, err := t.Tx.Samples(ctx, positions)
	t.reads.rows.Add(int64(len(out)))
	return out, err
}

func (t readTx) BatchSamples(ctx context.Context, step uint64) ([]buffer.Sample, error) {
	out, err := t.Tx.BatchSamples(ctx, step)
	t.reads.rows.Add(int64(len(out)))
	return out, err
}

// mindful is two buffers of one database, of which nobody tells the other what it does.
type mindful struct {
	*testing.T
	reads   [2]*reads
	servers [2]*buffer.Server
}

func newMindful(t *testing.T, c *bufferv1.LedgerConfig) *mindful {
	t.Helper()
	m := &mindful{T: t}
	folder := t.TempDir()
	for i := range m.servers {
		store, err := sqlstore.Open(t.Context(), sqldb.Files(filepath.Join(folder, "db")))
		if err != nil {
			t.Fatal(err)
		}
		m.reads[i] = &reads{Store: store}
		if m.servers[i], err = buffer.New(buffer.Config{Segments: filepath.Join(folder, "segments")}, buffer.Deps{Store: m.reads[i]}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			m.servers[i].Stop()
			_ = store.Close()
		})
	}
	m.open(0, c)
	if _, err := m.servers[0].RecordWeights(t.Context(), &bufferv1.RecordWeightsRequest{RunId: run, Digest: digest(0)}); err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *mindful) open(server int, c *bufferv1.LedgerConfig) {
	m.Helper()
	if _, err := m.servers[server].OpenLedger(m.Context(), &bufferv1.OpenLedgerRequest{RunId: run, Config: c}); err != nil {
		m.Fatal(err)
	}
}

func (m *mindful) put(server int, samples ...*trajectoryv1.TrajectoryEnvelope) {
	m.Helper()
	if _, err := m.servers[server].Accept(m.Context(), run, samples); err != nil {
		m.Fatal(err)
	}
}

// lease takes a step and holds it against the rows; it says how many were read to take it.
func (m *mindful) lease(server int, step uint64) (read int64) {
	m.Helper()
	before := m.reads[server].rows.Load()
	r, err := m.servers[server].LeaseBatch(m.Context(), &bufferv1.LeaseBatchRequest{RunId: run, Step: step})
	read = m.reads[server].rows.Load() - before
	if err != nil || r.GetBatch() == nil {
		m.Fatalf("%v: %v", r, err)
	}
	rows, err := m.servers[server].GetBatch(m.Context(), &bufferv1.GetBatchRequest{RunId: run, Step: step})
	if err != nil || !proto.Equal(rows.GetBatch(), r.GetBatch()) {
		m.Errorf("leased\n%v\nthe rows say\n%v, %v", r.GetBatch(), rows.GetBatch(), err)
	}
	return read
}

func part(e *trajectoryv1.TrajectoryEnvelope, n uint32) *trajectoryv1.TrajectoryEnvelope {
	h := proto.CloneOf(e.GetHeader())
	h.Key.Part = n
	return seal(h)
}

// A lease of what this process has ingested reads no sample, in whatever pieces and order the samples came.
func TestALeaseReadsNoSampleThatWasJustWritten(t *testing.T) {
	t.Parallel()
	m := newMindful(t, ledgerConfig())
	late, early := groupOf(1, 0, 0), groupOf(0, 0, 0)
	m.put(0, late[1:]...)
	m.put(0, failed(sampleOf(0, 0, 0), trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, "REWARD_TIMEOUT"))
	m.put(0, part(late[2], 1))
	m.put(0, groupOf(0, 1, 0)[1:]...) // a second attempt
	m.put(0, early...)                // of the first, which is over
	m.put(0, groupOf(0, 1, 0)...)
	m.put(0, late...)
	if read := m.lease(0, 1); read != 0 {
		t.Errorf("%d samples were read", read)
	}
	if read := m.reads[0].rows.Load(); read != 0 {
		t.Errorf("%d samples were read in all", read)
	}
}

// What another process writes is not missed.
func TestALeaseSeesWhatAnotherProcessWrote(t *testing.T) {
	t.Parallel()
	m := newMindful(t, ledgerConfig())
	m.put(0, groupOf(0, 0, 0)[:1]...)
	m.open(1, ledgerConfig())
	m.put(1, part(sampleOf(0, 0, 0), 1), groupOf(0, 0, 0)[1])
	m.put(0, groupOf(0, 0, 0)[2:]...)
	m.put(0, groupOf(1, 0, 0)...)
	m.lease(0, 1)
}

// What no step has taken of a run that ended is not held in memory for as long as the process lives.
func TestAClosedLedgerIsHeldNoMore(t *testing.T) {
	t.Parallel()
	m := newMindful(t, ledgerConfig())
	left := slices.Concat(groupOf(0, 0, 0), groupOf(1, 0, 0))
	m.put(0, left...)
	if _, err := m.servers[0].CloseLedger(t.Context(), &bufferv1.CloseLedgerRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	if read := m.lease(0, 1); read != int64(len(left)) {
		t.Errorf("%d samples were read of %d that came before the ledger was closed", read, len(left))
	}
}
