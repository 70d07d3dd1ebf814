package planner

import (
	"fmt"
	"os"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// trackerLibrary is what a sink needs of the workers' Python: one of these packages.
type trackerLibrary struct {
	table    string
	wanted   func(*configv1.SinksConfig) bool
	packages []string
}

var trackerLibraries = []trackerLibrary{
	{"tensorboard", func(s *configv1.SinksConfig) bool { return s.GetTensorboard() != nil }, []string{"tensorboard"}},
	{"wandb", func(s *configv1.SinksConfig) bool { return s.GetWandb() != nil }, []string{"wandb"}},
	{"mlflow", func(s *configv1.SinksConfig) bool { return s.GetMlflow() != nil }, []string{"mlflow", "mlflow-skinny"}},
}

// trackerCheck checks what the trackers in [sinks] need.
type trackerCheck struct {
	*draft
	python string // interpreter of the workers
}

// packages are the packages to ask for. They decide nothing that the run computes, so the plan does not pin them.
func (d *trackerCheck) packages() []string {
	var names []string
	for _, library := range trackerLibraries {
		if library.wanted(d.Config.GetSinks()) {
			names = append(names, library.packages...)
		}
	}
	return names
}

// answer says which sinks could not work.
func (d *trackerCheck) answer(answer *probe.Answer) {
	for _, library := range trackerLibraries {
		if !library.wanted(d.Config.GetSinks()) {
			continue
		}
		found := false
		for _, name := range library.packages {
			found = found || answer.Packages[name] != nil
		}
		if field := "sinks." + library.table; !found {
			d.report(field, problem.PackageMissing, fmt.Sprintf("`[%s]` needs the package %s, which the workers' Python has not", field, library.packages[0]),
				fmt.Sprintf("install it: %s -m pip install 'rollout-rl[%s]', or remove the table", d.python, library.table))
		}
	}
	const mode = "sinks.wandb.mode"
	if d.Config.GetSinks().GetWandb().GetMode() == "online" && !answer.WandbKey {
		d.report(mode, problem.Conflict, "`mode = \"online\"`, but there is no key of Weights & Biases where rolloutd runs",
			"run `wandb login` there or start rolloutd with WANDB_API_KEY, or write `mode = \"offline\"`")
	}
}

// read reports folders that are files.
func (d *trackerCheck) read() {
	sinks := d.Config.GetSinks()
	for field, path := range map[string]string{
		"sinks.tensorboard.directory": sinks.GetTensorboard().GetDirectory(), "sinks.wandb.directory": sinks.GetWandb().GetDirectory(),
	} {
		if info, err := os.Stat(d.resolve(path)); path != "" && err == nil && !info.IsDir() {
			d.report(field, problem.BadValue, path+" is a file, not a folder", "name a folder; it is made where it is not there")
		}
	}
}
