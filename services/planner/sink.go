package planner

import (
	"fmt"
	"os"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// sinkLibrary is what a sink needs of the workers' Python: one of these packages.
type sinkLibrary struct {
	table    string
	wanted   func(*configv1.SinksConfig) bool
	packages []string
}

var sinkLibraries = []sinkLibrary{
	{"tensorboard", func(s *configv1.SinksConfig) bool { return s.GetTensorboard() != nil }, []string{"tensorboard"}},
	{"wandb", func(s *configv1.SinksConfig) bool { return s.GetWandb() != nil }, []string{"wandb"}},
	{"mlflow", func(s *configv1.SinksConfig) bool { return s.GetMlflow() != nil }, []string{"mlflow", "mlflow-skinny"}},
}

// sinkPackages are the packages to ask for. They decide nothing that the run computes, so the plan does not pin them.
func (d *draft) sinkPackages() []string {
	var names []string
	for _, library := range sinkLibraries {
		if library.wanted(d.Config.GetSinks()) {
			names = append(names, library.packages...)
		}
	}
	return names
}

// sinkAnswer says which sinks could not work.
func (d *draft) sinkAnswer(answer *probe.Answer) {
	for _, library := range sinkLibraries {
		if !library.wanted(d.Config.GetSinks()) {
			continue
		}
		found := false
		for _, name := range library.packages {
			found = found || answer.Packages[name] != nil
		}
		if field := "sinks." + library.table; !found {
			d.Problems.At(d.Place(field), problem.PackageMissing, field,
				fmt.Sprintf("`[%s]` needs the package %s, which the workers' Python has not", field, library.packages[0]),
				fmt.Sprintf("install it: %s -m pip install 'rollout-rl[%s]', or remove the table", d.server.prober.Python, library.table))
		}
	}
	const mode = "sinks.wandb.mode"
	if d.Config.GetSinks().GetWandb().GetMode() == "online" && !answer.WandbKey {
		d.Problems.At(d.Place(mode), problem.Conflict, mode, "`mode = \"online\"`, but there is no key of Weights & Biases where rolloutd runs",
			"run `wandb login` there or start rolloutd with WANDB_API_KEY, or write `mode = \"offline\"`")
	}
}

// readSinks holds the folders of sinks against what is there.
func (d *draft) readSinks() {
	sinks := d.Config.GetSinks()
	for field, path := range map[string]string{
		"sinks.tensorboard.directory": sinks.GetTensorboard().GetDirectory(), "sinks.wandb.directory": sinks.GetWandb().GetDirectory(),
	} {
		if info, err := os.Stat(input.Resolve(d.baseDir, path)); path != "" && err == nil && !info.IsDir() {
			d.Problems.At(d.Place(field), problem.BadValue, field, path+" is a file, not a folder", "name a folder; it is made where it is not there")
		}
	}
}
