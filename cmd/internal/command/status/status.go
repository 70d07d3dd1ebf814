// Package status has the command `rollout status`.
package status

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// serviceHealth is one service as `status --format json` shows it.
type serviceHealth struct {
	Service string `json:"service"`
	Health  string `json:"health"`
}

// Command returns `rollout status`.
func Command(env *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Show the health of services, and active runs",
		Example: "  rollout status\n  rollout status --server 127.0.0.1:7600 --format json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return env.Plane.Look(cmd, func(ctx context.Context, c *client.Client) error { return show(ctx, env, c) })
		},
	}
}

func show(ctx context.Context, env *cli.Env, c *client.Client) error {
	var services []serviceHealth
	for _, target := range client.Targets {
		services = append(services, serviceHealth{target.Name, healthOf(ctx, c, target.Name, target.Service)})
	}
	runs, err := activeRuns(ctx, c)
	if err != nil {
		return err
	}
	if env.JSON() {
		return writeJSON(env, c, services, runs)
	}
	s := env.Style()
	fmt.Fprintf(env.Stdout, "%s\n", s.Bold("control plane "+c.Name))
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
	fmt.Fprint(env.Stdout, table.String())
	if len(runs) == 0 {
		fmt.Fprintln(env.Stdout, "no active runs")
	}
	for _, run := range runs {
		r := &live.Run{}
		r.Update(run)
		fmt.Fprintf(env.Stdout, "\n%s", r.View(s, 1000, env.Zone, ""))
	}
	return nil
}

// writeJSON writes one document; runs are in ProtoJSON.
func writeJSON(env *cli.Env, c *client.Client, services []serviceHealth, runs []*runv1.RunStatus) error {
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
	return output.Value(env.Stdout, document)
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

// activeRuns returns the runs that have not ended, with queues and workers, and what these wait
// for.
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
		got, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: run.GetRunId(), InFlight: true})
		if err != nil {
			return nil, err
		}
		out = append(out, got.GetStatus())
	}
	return out, nil
}
