package main

import (
	"maps"
	"slices"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/launch/external"
)

// elsewhere has the kinds of workers that do not run in the environment of this process.
func elsewhere(c config.Launch) map[string]bool {
	out := map[string]bool{}
	for worker, group := range c.Groups() {
		if group.Kind != config.LaunchLocal {
			out[worker] = true
		}
	}
	return out
}

// launchers returns the launcher of all kinds of workers, and the places of those that are
// external; nil if none are.
func launchers(m *mesh, here launch.Launcher) (launch.Launcher, scheduler.Places) {
	groups := m.cfg.Launch.Groups()
	outside := slices.DeleteFunc(slices.Sorted(maps.Keys(groups)), func(worker string) bool { return groups[worker].Kind != config.LaunchExternal })
	if len(outside) == 0 {
		return here, nil
	}
	pool, by := external.New(m.endpoints.grpc, outside...), launch.ByKind{Default: here, Kinds: map[string]launch.Named{}}
	for _, worker := range outside {
		by.Kinds[worker] = launch.Named{Name: config.LaunchExternal, Launcher: pool}
	}
	return by, pool
}
