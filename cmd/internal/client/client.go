// Package client connects to the control plane, with a stub for each public service. It uses only
// grpc: the options of libs/rpc link protovalidate, whose initialization takes as long as
// `rollout --help`.
//
// A service that the process at Options.Address does not host is looked up in Consul at its first
// call.
package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	servingv1 "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

const (
	reachable     = 5 * time.Second  // timeout of the first call to a server
	keepaliveTime = 10 * time.Second // a lost connection is noticed after keepaliveTime + reachable
	maxMessage    = 64 << 20
)

// Targets lists the services with the gRPC service whose health is that of the target.
var Targets = []struct{ Name, Service string }{
	{names.PlannerService, planv1.PlannerService_ServiceDesc.ServiceName},
	{names.SchedulerService, runv1.SchedulerService_ServiceDesc.ServiceName},
	{names.GatewayService, gatewayv1.RolloutGatewayService_ServiceDesc.ServiceName},
	{names.BufferService, bufferv1.BufferService_ServiceDesc.ServiceName},
	{names.ControllerService, learnerv1.LearnerControllerService_ServiceDesc.ServiceName},
	{names.SnapshotService, snapshotv1.SnapshotService_ServiceDesc.ServiceName},
	{names.StorageService, storagev1.EventService_ServiceDesc.ServiceName},
}

// Options configure a connection.
type Options struct {
	Address   string   // host:port of one process; empty: every service is looked up
	Hosted    []string // targets of that process; nil: all
	Consul    string   // host:port or URL of the agent in which other services are registered; may be empty
	ACL       string   // token for that agent; if it is empty or refused, the token of the calls is used, as by the embedded registry
	TokenFile string
	Key       string      // an API key, used instead of TokenFile
	TLS       *tls.Config // nil: plain text
}

// Client holds the connections until Close.
type Client struct {
	Planner   planv1.PlannerServiceClient
	Scheduler runv1.SchedulerServiceClient
	Serving   servingv1.ServingServiceClient
	Buffer    bufferv1.BufferServiceClient
	Snapshot  snapshotv1.SnapshotServiceClient
	Events    storagev1.EventServiceClient
	Artifacts storagev1.ArtifactServiceClient
	Gateway   gatewayv1.RolloutGatewayServiceClient
	Keys      keyv1.ApiKeyServiceClient

	Name       string // of the control plane, in messages
	Replicated bool   // a replica may take over from a service that fails; false for the local daemon

	main    *grpc.ClientConn // nil: every service is looked up
	options Options
	token   string
	mu      sync.Mutex
	found   map[string]*grpc.ClientConn // by service
	conns   map[string]*grpc.ClientConn // by address
}

// Of makes a client on one connection, which Close closes.
func Of(conn *grpc.ClientConn, name string) *Client {
	return (&Client{Name: name, main: conn}).stubs()
}

func (c *Client) stubs() *Client {
	c.found, c.conns = map[string]*grpc.ClientConn{}, map[string]*grpc.ClientConn{}
	c.Planner = planv1.NewPlannerServiceClient(c.conn(names.PlannerService))
	c.Scheduler = runv1.NewSchedulerServiceClient(c.conn(names.SchedulerService))
	c.Serving = servingv1.NewServingServiceClient(c.conn(names.SchedulerService))
	c.Buffer = bufferv1.NewBufferServiceClient(c.conn(names.BufferService))
	c.Snapshot = snapshotv1.NewSnapshotServiceClient(c.conn(names.SnapshotService))
	c.Events = storagev1.NewEventServiceClient(c.conn(names.StorageService))
	c.Artifacts = storagev1.NewArtifactServiceClient(c.conn(names.StorageService))
	c.Gateway = gatewayv1.NewRolloutGatewayServiceClient(c.conn(names.GatewayService))
	c.Keys = keyv1.NewApiKeyServiceClient(c.conn(names.GatewayService))
	return c
}

// conn returns the connection to a service.
func (c *Client) conn(service string) grpc.ClientConnInterface {
	hosted := c.options.Hosted == nil || slices.Contains(c.options.Hosted, service)
	if c.main != nil && (hosted || c.options.Consul == "") {
		return c.main
	}
	return route{c, service}
}

// Registry is the address of the agent in which services are looked up; "" if there is none.
func (c *Client) Registry() string { return c.options.Consul }

// Health returns the health of a gRPC service of a target; "" for the process.
func (c *Client) Health(ctx context.Context, target, service string) (*healthpb.HealthCheckResponse, error) {
	return healthpb.NewHealthClient(c.conn(target)).Check(ctx, &healthpb.HealthCheckRequest{Service: service})
}

// Dial connects, and returns an error if the server at Address does not answer.
func Dial(ctx context.Context, o Options) (*Client, error) {
	token, err := o.Key, error(nil)
	if token == "" {
		token, err = readToken(o.TokenFile)
	}
	if err != nil {
		return nil, err
	}
	c := &Client{Name: o.Address, Replicated: o.Hosted == nil, options: o, token: token}
	if o.Address == "" {
		c.Name = "of Consul " + o.Consul
		return c.stubs(), nil
	}
	if c.main, err = c.dial(o.Address); err != nil {
		return nil, err
	}
	waiting, cancel := context.WithTimeout(ctx, reachable)
	defer cancel()
	if _, err := healthpb.NewHealthClient(c.main).Check(waiting, &healthpb.HealthCheckRequest{}); err != nil {
		_ = c.main.Close()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if why := cert.Explain(err); rpcerr.Fix(why) != "" {
			return nil, &exit.Error{
				Code: exit.Unavailable, Reason: rpcerr.Reason(why), Fix: rpcerr.Fix(why),
				Err: fmt.Errorf("no TLS connection with %s: %w", o.Address, errors.New(rpcerr.Text(why))),
			}
		}
		return nil, exit.New(exit.Unavailable, "check that the server is running; without --server a local one is started",
			"the server %s does not answer: %w", o.Address, exit.From(err))
	}
	return c.stubs(), nil
}

// Addresses lists the processes of the control plane that are registered for any service; none if
// the registry does not answer.
func (c *Client) Addresses(ctx context.Context) []string {
	var all []string
	for _, target := range Targets {
		found, _ := instances(ctx, c.options, c.token, target.Name)
		for _, i := range found {
			all = append(all, i.address)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// At connects to one process of the control plane.
func (c *Client) At(address string) (*Client, error) {
	conn, err := c.dial(address)
	if err != nil {
		return nil, err
	}
	return Of(conn, address), nil
}

func (c *Client) dial(address string) (*grpc.ClientConn, error) {
	transport := insecure.NewCredentials()
	if c.options.TLS != nil {
		transport = credentials.NewTLS(c.options.TLS)
	}
	return grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(transport),
		grpc.WithPerRPCCredentials(bearer(c.token)),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}, MinConnectTimeout: reachable,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime, Timeout: reachable, PermitWithoutStream: true}),
		grpc.WithIdleTimeout(0))
}

// Close ends the connections.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	if c.main != nil {
		errs = append(errs, c.main.Close())
	}
	for _, conn := range c.conns {
		errs = append(errs, conn.Close())
	}
	return errors.Join(errs...)
}
