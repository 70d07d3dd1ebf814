package planner

import (
	"fmt"
	"slices"

	"github.com/rollout-rl/rollout/libs/reward"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// packageCheck pins the versions of the Python packages that decide what the run computes.
type packageCheck struct {
	config   *configv1.RunConfig
	problems *problem.List
	python   string // interpreter of the workers
}

// versions are those that the workers would run with. It reports missing packages.
func (d *packageCheck) versions(answer *probe.Answer) map[string]string {
	versions := map[string]string{"python": answer.Python}
	for _, name := range d.wanted() {
		if version := answer.Packages[name]; version != nil {
			versions[name] = *version
			continue
		}
		if name == "rollout-rl" {
			continue // run from a checkout
		}
		d.problems.Add(&planv1.Problem{
			Reason: problem.PackageMissing, Message: fmt.Sprintf("the Python of the workers lacks the package %s", name),
			Fix: fmt.Sprintf("install it: %s -m pip install %s", d.python, name),
		})
	}
	return versions
}

// wanted are the packages that decide what the run computes.
func (d *packageCheck) wanted() []string {
	names := slices.Clone(probe.Packages)
	if slices.ContainsFunc(reward.Parts(d.config), func(part reward.Part) bool { return part.Expression != "" }) {
		names = append(names, "cel-python")
	}
	if d.config.GetTrain().GetOptimizer() == "adamw_8bit" {
		names = append(names, "bitsandbytes")
	}
	return names
}
