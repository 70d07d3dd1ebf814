package main

import (
	"os/exec"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/launch/external"
	"github.com/rollout-rl/rollout/services/scheduler/launch/slurm"
)

// elsewhere has the kinds of workers that do not run on this host.
func elsewhere(c config.Launch) map[string]scheduler.Elsewhere {
	out := map[string]scheduler.Elsewhere{}
	for worker, group := range c.Groups() {
		if group.Kind != config.LaunchLocal {
			out[worker] = scheduler.Elsewhere{OwnEnv: group.Kind == config.LaunchExternal, Cores: group.CPUs}
		}
	}
	return out
}

var errSlurm = rpcerr.New(codes.Unavailable, "ROLLOUTD_NO_SLURM", "a command of Slurm is missing on this host").
	Fix("install the Slurm client on the host of the scheduler (package slurm-client), or set launch.kind to another launcher")

// checkLaunchers reports commands that a launcher needs and that this host does not have.
func checkLaunchers(c config.Launch) error {
	for _, group := range c.Groups() {
		if group.Kind != config.LaunchSlurm {
			continue
		}
		for _, program := range []string{"sbatch", "squeue", "scancel"} {
			if _, err := exec.LookPath(program); err != nil {
				return errSlurm.With("program", program).WithMessage("launch: workers are jobs of Slurm, and this host has no %s on PATH", program)
			}
		}
	}
	return nil
}

// launchers returns the launcher of all kinds of workers, and the places of those that are
// external; nil if none are.
func launchers(m *mesh, here launch.Launcher) (launch.Launcher, scheduler.Places) {
	var outside []string
	jobs := map[string]slurm.Resources{}
	for worker, group := range m.cfg.Launch.Groups() {
		switch group.Kind {
		case config.LaunchExternal:
			outside = append(outside, worker)
		case config.LaunchSlurm:
			jobs[worker] = slurm.Resources{
				Partition: group.Partition, Account: group.Account, TimeLimit: group.TimeLimit, CPUs: group.CPUs, GPUs: group.GPUs,
				Memory: group.Memory, Options: strings.Fields(group.Options),
			}
		}
	}
	if len(outside)+len(jobs) == 0 {
		return here, nil
	}
	by := launch.ByKind{Default: here, Kinds: map[string]launch.Named{}}
	cluster := slurm.New(jobs, 0, 0)
	for worker := range jobs {
		by.Kinds[worker] = launch.Named{Name: slurm.Name, Launcher: cluster}
	}
	if len(outside) == 0 {
		return by, nil
	}
	pool := external.New(m.endpoints.grpc, outside...)
	for _, worker := range outside {
		by.Kinds[worker] = launch.Named{Name: config.LaunchExternal, Launcher: pool}
	}
	return by, pool
}
