package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/proto/gen/names"
)

// target is one thing that a process can host.
type target struct {
	name string
	make func(ctx context.Context, m *mesh) (hosted, error) // nil: an embedded server, see servers.go
}

// hosted is a service that this process hosts.
type hosted struct {
	service interface {
		Register(grpc.ServiceRegistrar)
		Run(ctx context.Context) error
	}
	close func() error // closes its store, after Run has ended or construction has failed; may be nil
	url   string       // of its HTTP endpoint; may be empty
}

// targets is the table of targets. Services start in this order and stop in reverse, so that a
// service stops before those that it calls.
var targets = []target{
	{natsTarget, nil},
	{registryTarget, nil},
	{names.StorageService, newStorage},
	{names.BufferService, newBuffer},
	{names.SnapshotService, newSnapshot},
	{names.PlannerService, newPlanner},
	{names.GatewayService, newGateway},
	{names.ControllerService, newController},
	{names.SchedulerService, newScheduler},
}

// resolveTargets returns the configured targets in the order of the table. "all" stands for all
// services, and for the servers that are not configured to run elsewhere.
func resolveTargets(cfg config.Config) ([]target, error) {
	wanted := cfg.Target
	if slices.Contains(wanted, "all") {
		if len(wanted) > 1 {
			return nil, fmt.Errorf("target: all cannot be combined with other targets: %s", strings.Join(wanted, ","))
		}
		wanted = nil
		for _, t := range targets {
			external := t.name == natsTarget && cfg.NATS.URL != "" || t.name == registryTarget && cfg.Consul.Address != ""
			if !external && (t.make != nil || cfg.Join == "") {
				wanted = append(wanted, t.name)
			}
		}
	}
	var out []target
	for _, t := range targets {
		if slices.Contains(wanted, t.name) {
			out = append(out, t)
		}
	}
	for _, name := range wanted {
		if !slices.ContainsFunc(targets, func(t target) bool { return t.name == name }) {
			return nil, fmt.Errorf("target: %q is not a target; targets are all, %s", name, targetNames())
		}
	}
	return out, checkServers(cfg, out)
}

// checkServers returns an error if the process has no NATS server or registry, or two of one kind.
func checkServers(cfg config.Config, hosting []target) error {
	for _, s := range []struct{ target, key, elsewhere string }{
		{natsTarget, "nats.url", cfg.NATS.URL}, {registryTarget, "consul.address", cfg.Consul.Address},
	} {
		own := hosts(hosting, s.target)
		if own && s.elsewhere != "" {
			return fmt.Errorf("target: %s is hosted by this process, but %s names another one; use one of the two", s.target, s.key)
		}
		if !own && s.elsewhere == "" && cfg.Join == "" {
			return fmt.Errorf("target: %s is missing: add it to --target, set --%s, or join a rolloutd that hosts it with --join",
				s.target, strings.NewReplacer(".", "-", "_", "-").Replace(s.key))
		}
	}
	return nil
}

func hosts(list []target, name string) bool {
	return slices.ContainsFunc(list, func(t target) bool { return t.name == name })
}

// serviceNames returns the gRPC services among targets.
func serviceNames(list []target) []string {
	var out []string
	for _, t := range list {
		if t.make != nil {
			out = append(out, t.name)
		}
	}
	return out
}

func targetNames() string {
	var out []string
	for _, t := range targets {
		out = append(out, t.name)
	}
	return strings.Join(out, ", ")
}
