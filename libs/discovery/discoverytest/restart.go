package discoverytest

import (
	"context"
	"net"
	"slices"
	"testing"
	"time"

	consul "github.com/hashicorp/consul/api"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
)

// Restartable is an agent that a test may stop and start again at its address.
type Restartable struct {
	Agent
	Stop  func() // returns when the agent does not answer any more
	Start func() // returns when the agent answers; it may have lost its instances
}

// restartTTL outlives a slow start of the agent: a durable agent remembers the last renewal of each
// check.
const restartTTL = 3 * time.Second

// RunRestart checks registrations, watches and gRPC connections over a restart of the agent, which
// must be the test's own.
func RunRestart(t *testing.T, r Restartable) {
	b := setup(t, r.Agent)
	first, second := serve(t), serve(t)
	s := b.service("a", first.port)
	s.TTL = restartTTL
	stopFirst := b.register(t, s)
	s = b.service("b", second.port)
	s.TTL = restartTTL
	b.register(t, s)
	watch := b.client.Watch(t.Context(), b.name)
	b.await(t, watch, "a", "b")
	conn, err := grpc.NewClient("consul:///"+b.name, grpc.WithResolvers(b.client.Resolver()),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"round_robin":{}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	until(t, conn, first.address, second.address) // balances

	// The unhealthy gets no calls, and is back when it is healthy.
	var raw *consul.Client
	if raw, err = consul.NewClient(&consul.Config{Address: b.agent.Address, Scheme: "http", Token: b.agent.Token}); err != nil {
		t.Fatal(err)
	}
	silent := serve(t)
	id := b.name + "-silent"
	if err := raw.Agent().ServiceRegister(&consul.AgentServiceRegistration{
		ID: id, Name: b.name, Address: "127.0.0.1", Port: silent.port,
		Check: &consul.AgentServiceCheck{CheckID: "service:" + id, TTL: "1h", Status: consul.HealthPassing},
	}); err != nil {
		t.Fatal(err)
	}
	b.await(t, watch, "a", "b", "silent")
	until(t, conn, silent.address)
	if err := raw.Agent().FailTTL("service:"+id, "ill"); err != nil {
		t.Fatal(err)
	}
	b.await(t, watch, "a", "b")
	until(t, conn, first.address, second.address)
	if err := raw.Agent().ServiceDeregister(id); err != nil {
		t.Fatal(err)
	}

	// While the agent is stopped, and after it restarted without state, calls continue and watchers do
	// not see the services disappear.
	r.Stop()
	until(t, conn, first.address, second.address)
	r.Start()
	registered(t, raw, b.name, 2, conn)
	select {
	case list := <-watch:
		t.Errorf("the watch sent %v over the restart", b.ids(list))
	default:
	}
	stopFirst()
	b.await(t, watch, "b")
	until(t, conn, second.address)
}

// registered waits until the agent has n passing instances. Calls must succeed during that time.
func registered(t *testing.T, api *consul.Client, name string, n int, conn *grpc.ClientConn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		list, _, err := api.Health().Service(name, "", true, (&consul.QueryOptions{}).WithContext(ctx))
		if ctx.Err() != nil {
			t.Fatalf("not registered again: %v", err)
		}
		if _, callErr := call(ctx, conn); callErr != nil {
			t.Fatalf("a call while the agent came back: %v", callErr)
		}
		if err == nil && len(list) == n {
			return
		}
	}
}

// until calls until each of the addresses has answered, and then only they answer.
func until(t *testing.T, conn *grpc.ClientConn, addresses ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	seen := map[string]bool{}
	for round := 0; ; round++ {
		from, err := call(ctx, conn)
		if err != nil {
			t.Fatalf("a call after %d: %v", round, err)
		}
		if !slices.Contains(addresses, from) {
			clear(seen) // the balancer is notified of changes slightly later
			continue
		}
		if seen[from] = true; len(seen) == len(addresses) {
			return
		}
	}
}

// call is one unary call that does not wait for a connection; it gives who answered.
func call(ctx context.Context, conn *grpc.ClientConn) (string, error) {
	var from peer.Peer
	_, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{}, grpc.Peer(&from))
	if err != nil {
		return "", err
	}
	return from.Addr.String(), nil
}

// backend is a gRPC server.
type backend struct {
	address string
	port    int
}

func serve(t *testing.T) backend {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	healthpb.RegisterHealthServer(srv, health.NewServer())
	go func() { _ = srv.Serve(lis) }()
	t.Cleanup(srv.Stop)
	return backend{lis.Addr().String(), lis.Addr().(*net.TCPAddr).Port}
}
