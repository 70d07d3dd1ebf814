package client

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/exit"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// planner answers calls with the right token.
type planner struct {
	planv1.UnimplementedPlannerServiceServer
}

func (planner) ValidateConfig(ctx context.Context, _ *planv1.ValidateConfigRequest) (*planv1.ValidateConfigResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	if got := md.Get("authorization"); len(got) != 1 || got[0] != "Bearer secret" {
		return nil, status.Errorf(codes.Unauthenticated, "got %q", got)
	}
	return &planv1.ValidateConfigResponse{}, nil
}

type scheduler struct {
	runv1.UnimplementedSchedulerServiceServer
}

func (scheduler) ListRuns(context.Context, *runv1.ListRunsRequest) (*runv1.ListRunsResponse, error) {
	return &runv1.ListRunsResponse{NextPageToken: "here"}, nil
}

// serve hosts services on loopback and returns the address.
func serve(t *testing.T, register func(*grpc.Server), opts ...grpc.ServerOption) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(opts...)
	healthpb.RegisterHealthServer(server, health.NewServer())
	register(server)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Stop(); <-done })
	return listener.Addr().String()
}

func tokenFile(t *testing.T, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte("secret\n"), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func dial(t *testing.T, o Options) *Client {
	t.Helper()
	o.TokenFile = tokenFile(t, 0o600)
	c, err := Dial(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestTokenTravelsWithEachCall(t *testing.T) {
	t.Parallel()
	c := dial(t, Options{Address: serve(t, func(s *grpc.Server) { planv1.RegisterPlannerServiceServer(s, planner{}) })})
	if _, err := c.Planner.ValidateConfig(t.Context(), &planv1.ValidateConfigRequest{}); err != nil {
		t.Error(err)
	}
}

// entry is an instance in the answer of an agent, which a service of the control plane has signed.
func entry(service, address string, meta map[string]string) string {
	host, port, _ := net.SplitHostPort(address)
	number, _ := strconv.Atoi(port)
	text, _ := json.Marshal(map[string]any{"Node": map[string]any{"Address": host}, "Service": map[string]any{
		"ID": service + "-1", "Port": number, "Meta": discovery.NewSeal("secret").Sign(discovery.Service{Name: service, ID: service + "-1", Address: host, Port: number, Meta: meta}),
	}})
	return string(text)
}

func TestServicesApartAreLookedUp(t *testing.T) {
	t.Parallel()
	one := serve(t, func(s *grpc.Server) { planv1.RegisterPlannerServiceServer(s, planner{}) })
	other := serve(t, func(s *grpc.Server) { runv1.RegisterSchedulerServiceServer(s, scheduler{}) })
	asked := make(chan string, 8)
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.URL.RequestURI()
		if r.Header.Get("X-Consul-Token") != "secret" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		address := map[string]string{"/v1/health/service/scheduler": other, "/v1/health/service/planner": one}[r.URL.Path]
		if address == "" {
			fmt.Fprint(w, "[]")
			return
		}
		foreign := fmt.Sprintf(`{"Service": {"ID": "other", "Address": "127.0.0.1", "Port": %d, "Meta": {"epoch": "99"}}}`, 1)
		fmt.Fprintf(w, `[%s, %s]`, foreign, entry(filepath.Base(r.URL.Path), address, nil))
	}))
	t.Cleanup(agent.Close)
	consul := strings.TrimPrefix(agent.URL, "http://")
	for name, o := range map[string]Options{"some": {Address: one, Hosted: []string{"planner"}, Consul: consul}, "all": {Consul: consul}} {
		c := dial(t, o)
		for range 2 {
			got, err := c.Scheduler.ListRuns(t.Context(), &runv1.ListRunsRequest{})
			if err != nil || got.GetNextPageToken() != "here" {
				t.Errorf("%s: %v %v", name, got, err)
			}
		}
		if want := "/v1/health/service/scheduler?passing=1"; <-asked != want || len(asked) != 0 {
			t.Errorf("%s: looked up more than once, or something else", name)
		}
		if _, err := c.Planner.ValidateConfig(t.Context(), &planv1.ValidateConfigRequest{}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for len(asked) > 0 {
			<-asked
		}
		_, err := c.Events.QueryMetrics(t.Context(), nil)
		<-asked
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "look up storage in Consul "+consul+": no instance is passing its health check") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Consul gets its ACL token and not the mesh token; the embedded registry gets the mesh token and
// not one that was exported for Consul.
func TestConsulHasItsOwnToken(t *testing.T) {
	t.Parallel()
	var wanted atomic.Value
	wanted.Store("acl")
	at := serve(t, func(s *grpc.Server) { runv1.RegisterSchedulerServiceServer(s, scheduler{}) })
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Consul-Token") != wanted.Load() {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		fmt.Fprintf(w, `[%s]`, entry("scheduler", at, nil))
	}))
	t.Cleanup(agent.Close)
	consul := strings.TrimPrefix(agent.URL, "http://")
	if _, err := dial(t, Options{Consul: consul, ACL: "acl"}).Scheduler.ListRuns(t.Context(), &runv1.ListRunsRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := dial(t, Options{Consul: consul}).Scheduler.ListRuns(t.Context(), &runv1.ListRunsRequest{}); err == nil || !strings.Contains(err.Error(), "CONSUL_HTTP_TOKEN") {
		t.Errorf("got %v", err)
	}
	wanted.Store("secret")
	if _, err := dial(t, Options{Consul: consul, ACL: "acl"}).Scheduler.ListRuns(t.Context(), &runv1.ListRunsRequest{}); err != nil {
		t.Errorf("of the embedded registry: %v", err)
	}
}

// A dead scheduler stays registered for a moment, next to its successor.
func TestTheSuccessorIsFound(t *testing.T) {
	t.Parallel()
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addresses := []string{dead.Addr().String()}
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	tookOver := make(chan struct{})
	next := serve(t, func(s *grpc.Server) { runv1.RegisterSchedulerServiceServer(s, scheduler{}) })
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		select {
		case <-tookOver:
			addresses = append(addresses[:1], next)
		default:
		}
		var entries []string
		for epoch, address := range addresses {
			entries = append(entries, entry("scheduler", address, map[string]string{"epoch": strconv.Itoa(epoch + 9)}))
		}
		fmt.Fprintf(w, "[%s]", strings.Join(entries, ","))
	}))
	t.Cleanup(agent.Close)
	c := dial(t, Options{Consul: strings.TrimPrefix(agent.URL, "http://")})
	if !c.Replicated {
		t.Error("the local daemon has no replica")
	}
	if _, err := c.Scheduler.ListRuns(t.Context(), &runv1.ListRunsRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("of a dead scheduler: %v", err)
	}
	close(tookOver)
	if _, err := c.Scheduler.ListRuns(t.Context(), &runv1.ListRunsRequest{}); err != nil {
		t.Errorf("after the takeover: %v", err)
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	https := httptest.NewUnstartedServer(nil) // for its certificate
	https.StartTLS()
	t.Cleanup(https.Close)
	config := &tls.Config{Certificates: https.TLS.Certificates, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS12}
	address := serve(t, func(s *grpc.Server) { planv1.RegisterPlannerServiceServer(s, planner{}) }, grpc.Creds(credentials.NewTLS(config)))
	ca := filepath.Join(t.TempDir(), "ca.pem")
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: https.Certificate().Raw})
	if err := os.WriteFile(ca, block, 0o600); err != nil {
		t.Fatal(err)
	}
	trusted, err := TLSFor(address, cert.Files{CA: ca}, false)
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t, Options{Address: address, TLS: trusted})
	if _, err := c.Planner.ValidateConfig(t.Context(), &planv1.ValidateConfigRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := TLSFor(address, cert.Files{CA: "/nowhere"}, false); exit.From(err).Code != exit.NoInput {
		t.Errorf("got %v", err)
	}
	if _, err := TLSFor(address, cert.Files{CA: tokenFile(t, 0o600)}, false); exit.From(err).Code != exit.NoInput {
		t.Errorf("got %v", err)
	}
}

func TestPlainTextStaysOnThisMachine(t *testing.T) {
	t.Parallel()
	for address, plain := range map[string]bool{
		"127.0.0.1:1": true, "[::1]:1": true, "localhost:1": true, "10.0.0.1:1": false, "rollout.example:443": false, "127.0.0.1.evil.example:1": false,
	} {
		if config, err := TLSFor(address, cert.Files{}, false); err != nil || (config == nil) != plain {
			t.Errorf("%s: %v %v", address, config, err)
		}
		if config, _ := TLSFor(address, cert.Files{}, true); config != nil {
			t.Errorf("%s on a private network: %v", address, config)
		}
	}
}

func TestDialErrors(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		options Options
		code    int
		text    string
	}{
		"no token file":  {Options{Address: "127.0.0.1:1", TokenFile: "/nowhere/token"}, exit.NoInput, "the token file /nowhere/token does not exist"},
		"open token":     {Options{Address: "127.0.0.1:1", TokenFile: tokenFile(t, 0o644)}, exit.NoInput, "other users can read the token file"},
		"unknown domain": {Options{Address: "unknown.invalid:1", TokenFile: tokenFile(t, 0o600)}, exit.Unavailable, "does not answer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Dial(t.Context(), c.options)
			if err == nil || exit.From(err).Code != c.code || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v", err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Dial(ctx, Options{Address: "127.0.0.1:1", TokenFile: tokenFile(t, 0o600)}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
