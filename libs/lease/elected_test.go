package lease_test

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

// instance is a service whose answer has as many entries as the epoch.
type instance struct {
	healthpb.UnimplementedHealthServer
	epoch   uint64
	waiting chan struct{} // a call is running
}

func (i *instance) Register(r grpc.ServiceRegistrar) { healthpb.RegisterHealthServer(r, i) }

func (i *instance) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (i *instance) Check(ctx context.Context, req *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if req.GetService() == "wait" {
		close(i.waiting)
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_ServingStatus(i.epoch)}, nil
}

func (i *instance) Watch(_ *healthpb.HealthCheckRequest, s grpc.ServerStreamingServer[healthpb.HealthCheckResponse]) error {
	for range 3 {
		if err := s.Send(&healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_ServingStatus(i.epoch)}); err != nil {
			return err
		}
	}
	return nil
}

// member is a process with an Elected.
type member struct {
	client  healthpb.HealthClient
	conn    *grpc.ClientConn
	began   chan uint64
	waiting chan struct{}
	stop    context.CancelFunc
}

func join(t *testing.T, place sqldb.Place, name string, leader func() *grpc.ClientConn) *member {
	t.Helper()
	m := &member{began: make(chan uint64, 9), waiting: make(chan struct{})}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := lease.NewElected(lease.Options{
		Candidate: &lease.Candidate{Table: lease.NewTable(open(t, place), "x"), Holder: name, Address: lis.Addr().String(), TTL: ttl},
		Shape:     func(r grpc.ServiceRegistrar) { healthpb.RegisterHealthServer(r, nil) },
		Make:      func(epoch uint64) (lease.Service, error) { return &instance{epoch: epoch, waiting: m.waiting}, nil },
		Forward:   func() (grpc.ClientConnInterface, error) { return leader(), nil },
		Began:     func(_ context.Context, epoch uint64) func() { m.began <- epoch; return func() {} },
	})
	server := grpc.NewServer(grpc.UnaryInterceptor(rpcerr.Unary(nil)), grpc.StreamInterceptor(rpcerr.Stream(nil)))
	e.Register(server)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(lis) })
	wg.Go(func() {
		if err := e.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); server.Stop(); wg.Wait() })
	if m.conn, err = grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.conn.Close() })
	m.client, m.stop = healthpb.NewHealthClient(m.conn), cancel
	return m
}

func TestElected(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		p := place(t)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		var a, b *member
		a = join(t, p, "a", func() *grpc.ClientConn { return b.conn })
		if epoch := <-a.began; epoch != 1 {
			t.Fatalf("epoch %d", epoch)
		}
		b = join(t, p, "b", func() *grpc.ClientConn { return a.conn })
		for name, m := range map[string]*member{"leader": a, "replica": b} {
			if resp, err := m.client.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil || resp.GetStatus() != 1 {
				t.Errorf("a call to the %s: %v %v", name, resp, err)
			}
			stream, err := m.client.Watch(ctx, &healthpb.HealthCheckRequest{})
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for {
				if _, err := stream.Recv(); err != nil {
					break
				}
				n++
			}
			if n != 3 {
				t.Errorf("a stream of the %s: %d messages", name, n)
			}
		}
		inHand := make(chan error, 1)
		go func() {
			_, err := a.client.Check(ctx, &healthpb.HealthCheckRequest{Service: "wait"})
			inHand <- err
		}()
		<-a.waiting
		table := lease.NewTable(open(t, p), "x")
		for { // another process takes the lease, like from a suspended process
			seen, err := table.Read(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := table.Take(ctx, seen, "c", "127.0.0.1:1"); err == nil {
				break
			}
		}
		if err := <-inHand; rpcerr.Reason(err) != "NOT_LEADER" || rpcerr.Code(err) != codes.Unavailable {
			t.Errorf("a call that ran when the term ended: %v", err)
		}
		// Neither of the two leads now: the call is forwarded once, then refused with the known leader.
		_, err := a.client.Check(ctx, &healthpb.HealthCheckRequest{})
		if err != nil && rpcerr.Reason(err) != "NOT_LEADER" { // no call fails if the next leader is elected before, on a slow machine
			t.Errorf("a call without a leader: %v", err)
		}
		var next uint64
		select {
		case next = <-a.began:
		case next = <-b.began:
		}
		if next != 3 {
			t.Errorf("epoch %d, want 3", next)
		}
		if resp, err := b.client.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil || resp.GetStatus() != 3 {
			t.Errorf("after the change: %v %v", resp, err)
		}
	})
}

// Without a database no replica leads. Callers must read that, and not that another replica leads.
func TestACallWithoutALeaderNamesTheError(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		p := place(t)
		var a *member
		a = join(t, p, "a", func() *grpc.ClientConn { return a.conn })
		<-a.began
		if _, err := open(t, p).Exec(t.Context(), `ALTER TABLE lease RENAME TO lost`); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(time.Minute); ; {
			_, err := a.client.Check(t.Context(), &healthpb.HealthCheckRequest{})
			if err != nil && rpcerr.Reason(err) == "NOT_LEADER" && strings.Contains(rpcerr.Text(err), "lease") {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("got %v", err)
			}
			<-time.After(10 * time.Millisecond)
		}
	})
}
