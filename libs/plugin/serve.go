package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	pluginv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plugin/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
)

// Environment variables of a program that a worker starts.
const (
	AddressVariable   = "ROLLOUT_PLUGIN_ADDRESS"
	ArgumentsVariable = "ROLLOUT_PLUGIN_ARGS"
)

const mostBytes = 256 << 20 // of a message

// Config says where plugins are served. Version is that of their manifests.
type Config struct {
	Version   string
	Address   string                           // unix:/path or host:port
	Arguments json.RawMessage                  // of environments; a JSON object
	TLS       credentials.TransportCredentials // nil: none, for a socket of this host
	MaxBatch  uint32                           // most items of a request; 0: no limit
}

// Main serves plugins as a worker asks for it, and exits the process: with code 0 when the worker
// has ended, with 1 after an error.
func Main(version string, plugins ...Plugin) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	config := Config{Version: version, Address: os.Getenv(AddressVariable), Arguments: json.RawMessage(os.Getenv(ArgumentsVariable))}
	if config.Address == "" {
		fail(fmt.Errorf("%s is not set: name this program in a manifest, and check it with `rollout plugin test plugin.toml:NAME`", AddressVariable))
	}
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // it closes when the worker has ended
		cancel()
	}()
	err := Serve(ctx, config, plugins...)
	cancel()
	if err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// Serve serves plugins until the context ends. Open calls have a second to end.
func Serve(ctx context.Context, config Config, plugins ...Plugin) error {
	service, err := newServer(config, plugins)
	if err != nil {
		return err
	}
	network, address := "tcp", config.Address
	if path, ok := strings.CutPrefix(config.Address, "unix:"); ok {
		network, address = "unix", path
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, network, address)
	if err != nil {
		return fmt.Errorf("listen at %s: %w", config.Address, err)
	}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(mostBytes), grpc.MaxSendMsgSize(mostBytes), grpc.ChainUnaryInterceptor(ended, recovered),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
	if config.TLS != nil {
		options = append(options, grpc.Creds(config.TLS))
	}
	server := grpc.NewServer(options...)
	pluginv1.RegisterPluginServiceServer(server, service)
	checks := health.NewServer()
	checks.SetServingStatus(pluginv1.PluginService_ServiceDesc.ServiceName, healthv1.HealthCheckResponse_SERVING)
	healthv1.RegisterHealthServer(server, checks)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		checks.Shutdown()
		timer := time.AfterFunc(time.Second, server.Stop)
		defer timer.Stop()
		server.GracefulStop()
	}()
	err = server.Serve(listener)
	if ctx.Err() == nil {
		return err
	}
	<-stopped
	if errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	return err
}
