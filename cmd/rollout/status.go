package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/exit"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// targets are the services by name, with the gRPC service that their health is asked by.
var targets = []struct{ name, service string }{
	{names.PlannerService, planv1.PlannerService_ServiceDesc.ServiceName},
	{names.SchedulerService, runv1.SchedulerService_ServiceDesc.ServiceName},
	{names.GatewayService, gatewayv1.RolloutGatewayService_ServiceDesc.ServiceName},
	{names.BufferService, bufferv1.BufferService_ServiceDesc.ServiceName},
	{names.ControllerService, learnerv1.LearnerControllerService_ServiceDesc.ServiceName},
	{names.SnapshotService, snapshotv1.SnapshotService_ServiceDesc.ServiceName},
	{names.StorageService, storagev1.EventService_ServiceDesc.ServiceName},
}

// serviceHealth is one service as `status --format json` shows it.
type serviceHealth struct {
	Service string `json:"service"`
	Health  string `json:"health"`
}

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Show the services, and the queues and workers of the runs that go on",
		Example: "  rollout status\n  rollout status --server 127.0.0.1:7600 --format json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.look(cmd, a.status)
		},
	}
}

func (a *app) status(ctx context.Context, c *client.Client) error {
	var services []serviceHealth
	for _, target := range targets {
		services = append(services, serviceHealth{target.name, healthOf(ctx, c, target.name, target.service)})
	}
	runs, err := activeRuns(ctx, c)
	if err != nil {
		return err
	}
	if a.format == formatJSON {
		return a.statusJSON(c, services, runs)
	}
	s := a.style()
	fmt.Fprintf(a.stdout, "%s\n", s.Bold("control plane "+c.Name))
	var table output.Table
	for _, service := range services {
		health := service.Health
		switch health {
		case "serving":
			health = s.Green(health)
		case "not hosted here":
			health = s.Dim(health)
		default:
			health = s.Red(health)
		}
		table.Row("  "+service.Service, health)
	}
	fmt.Fprint(a.stdout, table.String())
	if len(runs) == 0 {
		fmt.Fprintln(a.stdout, "no run goes on")
	}
	for _, run := range runs {
		r := &live.Run{}
		r.Update(run)
		fmt.Fprintf(a.stdout, "\n%s", r.View(s, 1000, a.zone, ""))
	}
	return nil
}

// statusJSON writes one document; the runs are the contract's own JSON.
func (a *app) statusJSON(c *client.Client, services []serviceHealth, runs []*runv1.RunStatus) error {
	document := map[string]any{"control_plane": c.Name, "services": services}
	list := []any{}
	for _, run := range runs {
		value, err := output.Any(run)
		if err != nil {
			return err
		}
		list = append(list, value)
	}
	document["runs"] = list
	return output.Value(a.stdout, document)
}

func healthOf(ctx context.Context, c *client.Client, target, service string) string {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	response, err := c.Health(ctx, target, service)
	switch {
	case status.Code(err) == codes.NotFound:
		return "not hosted here"
	case err != nil:
		return "unknown: " + exit.From(err).Error()
	case response.GetStatus() == healthpb.HealthCheckResponse_SERVING:
		return "serving"
	}
	return "not serving"
}

// activeRuns are the runs that have not ended, with queues and workers.
func activeRuns(ctx context.Context, c *client.Client) ([]*runv1.RunStatus, error) {
	response, err := c.Scheduler.ListRuns(ctx, &runv1.ListRunsRequest{States: []runv1.RunState{
		runv1.RunState_RUN_STATE_PENDING, runv1.RunState_RUN_STATE_STARTING, runv1.RunState_RUN_STATE_RUNNING,
		runv1.RunState_RUN_STATE_PAUSED, runv1.RunState_RUN_STATE_DRAINING,
	}})
	if err != nil {
		return nil, err
	}
	var out []*runv1.RunStatus
	for _, run := range response.GetRuns() {
		got, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: run.GetRunId()})
		if err != nil {
			return nil, err
		}
		out = append(out, got.GetStatus())
	}
	return out, nil
}
