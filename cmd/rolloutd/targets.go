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

// hosted is a constructed service.
type hosted struct {
	service interface {
		Register(grpc.ServiceRegistrar)
		Run(ctx context.Context) error
	}
	close func() error // of its store; nil where there is none. Called after Run ended, also where construction failed
	url   string       // of its HTTP endpoint, where it has one
}

// targets is the table. Services are constructed in this order and end in the opposite one: who calls others ends before them.
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

// resolveTargets gives what the configuration asks for, in the order of the table. "all" is every service and those servers that
// are not found elsewhere.
func resolveTargets(cfg config.Config) ([]target, error) {
	wanted := cfg.Target
	if slices.Contains(wanted, "all") {
		if len(wanted) > 1 {
			return nil, fmt.Errorf("target: all stands alone, here it stands with others: %s", strings.Join(wanted, ","))
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
			return nil, fmt.Errorf("target: %q is unknown; targets are all, %s", name, targetNames())
		}
	}
	return out, checkServers(cfg, out)
}

// checkServers refuses a process that could not reach NATS or a registry, or would host one that it is also told to find elsewhere.
func checkServers(cfg config.Config, hosting []target) error {
	for _, s := range []struct{ target, key, elsewhere string }{
		{natsTarget, "nats.url", cfg.NATS.URL}, {registryTarget, "consul.address", cfg.Consul.Address},
	} {
		own := hosts(hosting, s.target)
		if own && s.elsewhere != "" {
			return fmt.Errorf("target: %s is hosted here and %s names another one; choose one of the two", s.target, s.key)
		}
		if !own && s.elsewhere == "" && cfg.Join == "" {
			return fmt.Errorf("target: no %s: add it to --target, name one with --%s, or join the state folder of a rolloutd that hosts it with --join",
				s.target, strings.NewReplacer(".", "-", "_", "-").Replace(s.key))
		}
	}
	return nil
}

func hosts(list []target, name string) bool {
	return slices.ContainsFunc(list, func(t target) bool { return t.name == name })
}

// serviceNames is the hosted gRPC services.
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
