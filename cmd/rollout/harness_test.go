package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/command"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/test/bufconn"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

var update = flag.Bool("update", false, "update the golden files")

// plane is a control plane in memory.
type plane struct {
	listener *bufconn.Listener
	health   *health.Server
	stop     func()
}

// registrar is a service.
type registrar interface{ Register(grpc.ServiceRegistrar) }

// newPlane serves the services until the test ends.
func newPlane(t *testing.T, services ...registrar) *plane {
	t.Helper()
	p := &plane{listener: bufconn.Listen(1 << 20), health: health.NewServer()}
	server := grpc.NewServer(grpc.UnaryInterceptor(rpcerr.Unary(slog.New(slog.DiscardHandler))), grpc.StreamInterceptor(rpcerr.Stream(slog.New(slog.DiscardHandler))))
	healthpb.RegisterHealthServer(server, p.health)
	for _, service := range services {
		service.Register(server)
	}
	for name := range server.GetServiceInfo() {
		p.health.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
	}
	p.stop = server.Stop
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(p.listener) }()
	t.Cleanup(func() { server.Stop(); <-done })
	return p
}

func (p *plane) dial(context.Context) (*client.Client, error) {
	conn, err := grpc.NewClient("passthrough:///memory", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return p.listener.DialContext(ctx) }))
	if err != nil {
		return nil, err
	}
	return client.Of(conn, "127.0.0.1:7600"), nil
}

// call is one call of the program in a test.
type call struct {
	plane      *plane
	stdin      io.Reader
	env        map[string]string
	interrupts <-chan os.Signal
	now        func() time.Time
	typed      bool // by a person at a terminal
}

// result is the output and exit code of a call.
type result struct {
	stdout, stderr string
	code           int
}

func (c call) run(t *testing.T, args ...string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	var environ []string
	for name, value := range c.env {
		environ = append(environ, name+"="+value)
	}
	if c.stdin == nil {
		c.stdin = strings.NewReader("")
	}
	env := cli.New(c.stdin, &cli.Printer{Stdout: &stdout, Stderr: &stderr, Zone: time.UTC}, environ)
	env.Interactive, env.Version = c.typed, "test"
	if c.now != nil {
		env.Now = c.now
	}
	if c.plane != nil {
		env.Plane.Dial = c.plane.dial
	}
	env.Signals = func() (<-chan os.Signal, func()) { return c.interrupts, func() {} }
	code := command.Execute(t.Context(), env, args)
	return result{stdout.String(), stderr.String(), code}
}

// text is a result in the form of the golden files.
func (r result) text() string {
	text := r.stdout
	if r.stderr != "" {
		text += "--- stderr\n" + r.stderr
	}
	return fmt.Sprintf("%s--- exit %d\n", text, r.code)
}

// golden compares with a file, or writes it with -update.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; write it with -update", err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}
