package discovery_test

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/discovery/discoverytest"
	"github.com/rollout-rl/rollout/libs/discovery/registry"
)

const token = "s3cret"

// agent serves an embedded registry and gives its host:port.
func agent(t *testing.T) string {
	t.Helper()
	r := registry.New(token)
	s := httptest.NewServer(r.Handler())
	t.Cleanup(func() { r.Close(); s.CloseClientConnections(); s.Close() })
	return strings.TrimPrefix(s.URL, "http://")
}

func client(t *testing.T, address, token string) *discovery.Client {
	t.Helper()
	c, err := discovery.NewClient(discovery.Options{Address: address, Token: token})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestEmbeddedRegistryConforms(t *testing.T) {
	t.Parallel()
	discoverytest.Run(t, discoverytest.Agent{Address: agent(t), Token: token})
}

func TestErrors(t *testing.T) {
	t.Parallel()
	wrong := client(t, agent(t), "wrong")
	s := discovery.Service{Name: "x", ID: "x", Address: "127.0.0.1", Port: 1}
	if _, err := wrong.Register(t.Context(), s); !errors.Is(err, discovery.ErrDenied) {
		t.Errorf("register with a wrong token: %v", err)
	}
	if err := wrong.Ready(t.Context()); !errors.Is(err, discovery.ErrDenied) {
		t.Errorf("ready with a wrong token: %v", err)
	}
	unreachable := client(t, "127.0.0.1:1", "")
	if _, err := unreachable.Lookup(t.Context(), "x"); !errors.Is(err, discovery.ErrUnavailable) {
		t.Errorf("lookup without an agent: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := unreachable.Register(ctx, s); err == nil {
		t.Error("registered without an agent")
	}
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer silent.Close()
	short, end := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer end()
	if err := client(t, strings.TrimPrefix(silent.URL, "http://"), "").Ready(short); !errors.Is(err, discovery.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ready with an agent that does not answer in time: %v", err)
	}
}

// Who uses other tools of Consul's makers has these exported always.
func TestVariablesForOtherToolsDoNotCount(t *testing.T) {
	for _, name := range []string{
		"CONSUL_HTTP_ADDR", "CONSUL_HTTP_TOKEN", "CONSUL_HTTP_TOKEN_FILE", "CONSUL_HTTP_AUTH", "CONSUL_HTTP_SSL", "CONSUL_HTTP_SSL_VERIFY",
		"CONSUL_CACERT", "CONSUL_CAPATH", "CONSUL_CLIENT_CERT", "CONSUL_CLIENT_KEY", "CONSUL_TLS_SERVER_NAME", "CONSUL_NAMESPACE", "CONSUL_PARTITION",
	} {
		t.Setenv(name, "/elsewhere")
	}
	t.Setenv("CONSUL_HTTP_SSL", "true")
	for _, mine := range []string{token, ""} {
		r := registry.New(mine)
		handler, strange := r.Handler(), atomic.Int32{}
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if q := req.URL.Query(); q.Has("ns") || q.Has("partition") || req.Header.Get("X-Consul-Token") != mine {
				strange.Add(1)
			}
			handler.ServeHTTP(w, req)
		}))
		c := client(t, strings.TrimPrefix(s.URL, "http://"), mine)
		ctx, cancel := context.WithCancel(t.Context())
		registration, err := c.Register(ctx, discovery.Service{Name: "x", ID: "x", Address: "127.0.0.1", Port: 1})
		if err != nil {
			t.Fatal(err)
		}
		if list, err := c.Lookup(ctx, "x"); err != nil || len(list) != 1 {
			t.Errorf("found %v, %v", list, err)
		}
		cancel()
		registration.Wait()
		r.Close()
		s.Close()
		if n := strange.Load(); n > 0 {
			t.Errorf("%d requests have values of the environment", n)
		}
	}
}

func TestEmbeddedRegistryRestart(t *testing.T) {
	t.Parallel()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := lis.Addr().String()
	stop := func() {}
	start := func() {
		r := registry.New("")
		s := &http.Server{Handler: r.Handler()}
		go func(l net.Listener) { _ = s.Serve(l) }(lis)
		stop = func() { r.Close(); _ = s.Close() }
	}
	start()
	defer func() { stop() }()
	discoverytest.RunRestart(t, discoverytest.Restartable{
		Agent: discoverytest.Agent{Address: address}, Stop: func() { stop() },
		Start: func() {
			if lis, err = net.Listen("tcp", address); err != nil {
				t.Fatal(err)
			}
			start()
		},
	})
}

// A call through consul:/// waits for the first instance, and follows it to another address.
func TestResolver(t *testing.T) {
	t.Parallel()
	c := client(t, agent(t), token)
	conn, err := grpc.NewClient("consul:///buffer", grpc.WithResolvers(c.Resolver()),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"round_robin":{}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	call := func(options ...grpc.CallOption) error {
		_, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}, options...)
		return err
	}
	if err := call(); err == nil {
		t.Fatal("a call without an instance succeeded")
	}
	done := make(chan error, 1)
	go func() { done <- call(grpc.WaitForReady(true)) }()
	stop := host(t, c, "b1")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	stop()
	host(t, c, "b2")
	if err := call(grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
}

// host serves gRPC health as the service "buffer" until stop.
func host(t *testing.T, c *discovery.Client, id string) (stop func()) {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	healthpb.RegisterHealthServer(srv, health.NewServer())
	go func() { _ = srv.Serve(lis) }()
	ctx, cancel := context.WithCancel(t.Context())
	reg, err := c.Register(ctx, discovery.Service{
		Name: "buffer", ID: id, Address: "127.0.0.1", Port: lis.Addr().(*net.TCPAddr).Port,
	})
	if err != nil {
		t.Fatal(err)
	}
	stop = func() { cancel(); reg.Wait(); srv.Stop() }
	t.Cleanup(stop)
	return stop
}

// An agent may restart without instances between two successful queries. Its index shows that, and
// the instances are kept.
func TestWatchKeepsInstancesOverAnUnseenRestart(t *testing.T) {
	t.Parallel()
	var current atomic.Pointer[registry.Registry]
	current.Store(registry.New(""))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { current.Load().Handler().ServeHTTP(w, req) }))
	defer server.Close()
	defer func() { current.Load().Close(); server.CloseClientConnections() }()
	c := client(t, strings.TrimPrefix(server.URL, "http://"), "")
	register := func() {
		reg, err := c.Register(t.Context(), discovery.Service{Name: "x", ID: "x1", Address: "127.0.0.1", Port: 1, TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(reg.Wait)
	}
	register()
	watch := c.Watch(t.Context(), "x")
	if list := <-watch; len(list) != 1 {
		t.Fatalf("instances %v, want x1", list)
	}
	old := current.Swap(registry.New(""))
	old.Close() // answers the query that waits
	select {
	case list := <-watch:
		t.Fatalf("the watch sent %v", list)
	case <-time.After(500 * time.Millisecond): // what must not happen can't be waited for
	}
}

// A process that can write to Consul but lacks the mesh token cannot make clients connect to it:
// neither with its own registration nor with a changed copy of an authentic one.
func TestForeignRegistrationsAreNotDialed(t *testing.T) {
	t.Parallel()
	address := agent(t)
	ours, err := discovery.NewClient(discovery.Options{Address: address, Token: token, Seal: discovery.NewSeal("mesh")})
	if err != nil {
		t.Fatal(err)
	}
	other, err := discovery.NewClient(discovery.Options{Address: address, Token: token, Seal: discovery.NewSeal("another mesh")})
	if err != nil {
		t.Fatal(err)
	}
	plain := client(t, address, token)
	register := func(c *discovery.Client, s discovery.Service) {
		t.Helper()
		if _, err := c.Register(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	genuine := discovery.Service{Name: "buffer", ID: "genuine", Address: "127.0.0.1", Port: 1, Meta: map[string]string{discovery.MetaEpoch: "3"}}
	register(ours, genuine)
	registered, err := plain.Lookup(t.Context(), "buffer")
	if err != nil || len(registered) != 1 {
		t.Fatal(registered, err)
	}
	copied := func(id string, port int, meta ...string) discovery.Service {
		s := discovery.Service{Name: "buffer", ID: id, Address: "127.0.0.1", Port: port, Meta: maps.Clone(registered[0].Meta)}
		for i := 0; i < len(meta); i += 2 {
			s.Meta[meta[i]] = meta[i+1]
		}
		return s
	}
	register(plain, discovery.Service{Name: "buffer", ID: "unsigned", Address: "127.0.0.1", Port: 2})
	register(other, discovery.Service{Name: "buffer", ID: "other", Address: "127.0.0.1", Port: 3})
	register(plain, copied("genuine-2", 1))
	register(plain, copied("genuine", 4))
	register(plain, copied("newer", 1, discovery.MetaEpoch, "9"))
	register(plain, copied("lines", 1, "a", "1\nb=2"))
	register(ours, genuine)
	register(plain, discovery.Service{Name: "inference-worker", ID: "w", Address: "127.0.0.1", Port: 5})
	if list := <-ours.Watch(t.Context(), "buffer"); len(list) != 1 || list[0].ID != "genuine" || list[0].Address != "127.0.0.1:1" {
		t.Errorf("watch: %+v", list)
	}
	if list := <-ours.Watch(t.Context(), "inference-worker"); len(list) != 1 {
		t.Errorf("workers are verified by the scheduler, not here: %+v", list)
	}
}
