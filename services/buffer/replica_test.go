package buffer_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/sqlstore"
)

// pair is two buffers with one database, one stream, and one folder of segments, as in two
// processes.
type pair struct {
	*bench
	table   *lease.Table
	conns   [2]*grpc.ClientConn
	began   chan *sqlstore.Store // of each term, with its fence
	clients [2]bufferv1.BufferServiceClient
}

func newPair(t *testing.T, place sqldb.Place) *pair {
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
	p := &pair{began: make(chan *sqlstore.Store, 9), bench: &bench{TB: t, folder: folder, bus: b, events: &recorder{}}}
	for i := range p.clients {
		p.host(t, place, i)
	}
	return p
}

func (p *pair) host(t *testing.T, place sqldb.Place, i int) {
	t.Helper()
	store, err := sqlstore.Open(t.Context(), place)
	if err != nil {
		t.Fatal(err)
	}
	p.table = store.Lease()
	edge, err := rpc.NewServer(rpc.ServerOptions{Drain: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	address, err := edge.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	elected := lease.NewElected(lease.Options{
		Candidate: &lease.Candidate{Table: store.Lease(), Holder: address.String(), Address: address.String(), TTL: 3 * time.Second},
		Shape:     func(r grpc.ServiceRegistrar) { bufferv1.RegisterBufferServiceServer(r, nil) },
		Make: func(epoch uint64) (lease.Service, error) {
			fenced := store.Fenced(store.Lease().Fence(epoch))
			p.began <- fenced
			return buffer.New(buffer.Config{Segments: filepath.Join(p.folder, "segments"), SegmentBytes: 8 << 10},
				buffer.Deps{Store: fenced, Bus: p.bus, Events: p.events})
		},
		Forward: func() (grpc.ClientConnInterface, error) { return p.conns[1-i], nil },
	})
	elected.Register(edge)
	if p.conns[i], err = rpc.NewDialer(rpc.DialerOptions{}).Dial(address.String()); err != nil {
		t.Fatal(err)
	}
	p.clients[i] = bufferv1.NewBufferServiceClient(p.conns[i])
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, part := range []func(context.Context) error{elected.Run, edge.Run} {
		wg.Go(func() {
			if err := part(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		if err := errors.Join(p.conns[i].Close(), store.Close()); err != nil {
			t.Error(err)
		}
	})
}

// usurp takes the lease from a paused process, for a holder that never renews it.
func (p *pair) usurp() {
	p.Helper()
	for {
		seen, err := p.table.Read(p.Context())
		if err != nil {
			p.Fatal(err)
		}
		if _, err := p.table.Take(p.Context(), seen, "usurper", ""); err == nil {
			return
		}
	}
}

// Only one of two buffers ingests, leases, and commits. When the other takes the lease, the store
// refuses the writes of the first one, and the other continues from the ledger. Both accept calls,
// and nothing is lost or counted twice.
func TestTwoBuffers(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		p := newPair(t, place(t))
		old := <-p.began
		p.client = p.clients[0]
		p.open(ledgerConfig())
		p.record(0)
		for step := uint64(1); step <= 3; step++ {
			for position := (step - 1) * 2; position < step*2; position++ {
				p.publish(groupOf(position, 0, step-1)...)
				p.publish(groupOf(position, 0, step-1)...) // a duplicate
			}
			p.client = p.clients[step%2]
			if b := p.lease(step); len(b.GetSamples()) != 2*size {
				t.Fatalf("step %d: %d samples", step, len(b.GetSamples()))
			} else {
				p.commit(b)
			}
			p.until("the twins", func(l *bufferv1.LedgerState) bool { return l.GetDuplicates() == step*2*size })
			p.usurp()
			err := old.Update(t.Context(), run, func(tx ledger.Tx) error { tx.Ledger().Step = 99; return nil })
			if !errors.Is(err, lease.ErrFenced) {
				t.Errorf("a write of the old term: %v", err)
			}
			old = <-p.began
			for _, client := range p.clients { // either may be called
				p.client = client
				p.retried(func() error {
					_, err := client.GetBatch(t.Context(), &bufferv1.GetBatchRequest{RunId: run, Step: step})
					return err
				})
			}
		}
		for step := uint64(1); step <= 3; step++ {
			if got, err := p.payloads(step); err != nil || len(got) != 2*size {
				t.Errorf("payloads of step %d: %d, %v", step, len(got), err)
			}
		}
		resp, err := p.client.ListSteps(t.Context(), &bufferv1.ListStepsRequest{RunId: run})
		if err != nil || len(resp.GetSteps()) != 3 {
			t.Errorf("steps: %v %v", resp, err)
		}
		p.until("no group left", func(l *bufferv1.LedgerState) bool { return l.GetConsumed() == 6 && l.GetSamples() == 6*size })
	})
}

// retried repeats calls that fail because no replica leads, until the test times out.
func (p *pair) retried(call func() error) {
	p.Helper()
	for {
		err := call()
		if err == nil {
			return
		}
		if !errors.Is(fromWire(err), lease.ErrNotLeader) {
			p.Fatal(err)
		}
	}
}

// fromWire is the domain error in a status.
func fromWire(err error) error {
	if e, ok := rpcerr.From(err); ok {
		return e
	}
	return err
}
