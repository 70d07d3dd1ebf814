package planner

import (
	"fmt"
	"os"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// trackerLibrary has the packages of a tracker, of which one must be installed.
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
	sinks    *configv1.SinksConfig
	findings findings
	resolve  func(path string) string // the folder of a path in the configuration
	python   string                   // interpreter of the workers
}

// packages are the packages of the trackers. The plan does not pin them, as they do not change what
// the run computes.
func (d *trackerCheck) packages() []string {
	var names []string
	for _, library := range trackerLibraries {
		if library.wanted(d.sinks) {
			names = append(names, library.packages...)
		}
	}
	return names
}

// answer reports trackers that would fail.
func (d *trackerCheck) answer(answer *probe.Answer) {
	for _, library := range trackerLibraries {
		if !library.wanted(d.sinks) {
			continue
		}
		found := false
		for _, name := range library.packages {
			found = found || answer.Packages[name] != nil
		}
		if field := "sinks." + library.table; !found {
			d.findings.report(field, problem.PackageMissing, fmt.Sprintf("`[%s]` needs the package %s, which the Python of the workers lacks", field, library.packages[0]),
				fmt.Sprintf("install it: %s -m pip install 'rollout-workers[%s]', or remove the table", d.python, library.table))
		}
	}
	const mode = "sinks.wandb.mode"
	if d.sinks.GetWandb().GetMode() == "online" && !answer.WandbKey {
		d.findings.report(mode, problem.Conflict, "`mode = \"online\"` needs an API key of Weights & Biases where rolloutd runs",
			"run `wandb login` there or start rolloutd with WANDB_API_KEY, or write `mode = \"offline\"`")
	}
}

// read reports folders that are files.
func (d *trackerCheck) read() {
	for field, path := range map[string]string{
		"sinks.tensorboard.directory": d.sinks.GetTensorboard().GetDirectory(), "sinks.wandb.directory": d.sinks.GetWandb().GetDirectory(),
	} {
		if info, err := os.Stat(d.resolve(path)); path != "" && err == nil && !info.IsDir() {
			d.findings.report(field, problem.BadValue, path+" is a file, not a folder", "use a folder; it is created if it does not exist")
		}
	}
}
