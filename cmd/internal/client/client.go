// Package client is one connection to the control plane with a stub for each public service. It is written on grpc alone: the
// options of libs/rpc link a compiler of rules, whose start costs a third of what `rollout --help` takes.
package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/rollout-rl/rollout/cmd/internal/exit"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

const (
	reachable     = 5 * time.Second  // how long a server that was named may take to answer at all
	keepaliveTime = 10 * time.Second // a server that vanished without a word is found out in keepaliveTime + reachable
	maxMessage    = 64 << 20
)

// Client is the connection. Close it.
type Client struct {
	Planner   planv1.PlannerServiceClient
	Scheduler runv1.SchedulerServiceClient
	Snapshot  snapshotv1.SnapshotServiceClient
	Events    storagev1.EventServiceClient
	Gateway   gatewayv1.RolloutGatewayServiceClient
	Health    healthpb.HealthClient

	Address string
	conn    io
}

type io interface{ Close() error }

// Of makes the stubs on a connection, which Close closes.
func Of(conn *grpc.ClientConn, address string) *Client {
	return &Client{
		Planner:   planv1.NewPlannerServiceClient(conn),
		Scheduler: runv1.NewSchedulerServiceClient(conn),
		Snapshot:  snapshotv1.NewSnapshotServiceClient(conn),
		Events:    storagev1.NewEventServiceClient(conn),
		Gateway:   gatewayv1.NewRolloutGatewayServiceClient(conn),
		Health:    healthpb.NewHealthClient(conn),
		Address:   address,
		conn:      conn,
	}
}

// Dial connects to host:port with the token of a file, and fails where nobody answers.
func Dial(ctx context.Context, address, tokenFile string) (*Client, error) {
	token, err := readToken(tokenFile)
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithPerRPCCredentials(bearer(token)),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}, MinConnectTimeout: reachable,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime, Timeout: reachable, PermitWithoutStream: true}),
		grpc.WithIdleTimeout(0))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", address, err)
	}
	c := Of(conn, address)
	ctx, cancel := context.WithTimeout(ctx, reachable)
	defer cancel()
	if _, err := c.Health.Check(ctx, &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true)); err != nil {
		_ = conn.Close()
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, ctx.Err()
		}
		return nil, exit.New(exit.Unavailable, "is it running there? Without --server a local one is started",
			"the server %s does not answer: %w", address, cause(err))
	}
	return c, nil
}

func cause(err error) error {
	if e := exit.From(err); e.Err != nil {
		return e.Err
	}
	return fmt.Errorf("%w", err)
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }
