// Package planner turns a configuration into a plan: everything that can be known before the run is
// checked at once, and everything the run depends on is pinned by digest. It has no state.
//
//	ConfigSource --config--> RunConfig --input, probe--> Problems | Plan --lock--> plan.lock
//
// Its packages: document reads TOML with positions, config binds it to the contract, input reads
// datasets and model folders, memory predicts what the processes will hold, probe makes the dry
// calls in Python, lock writes and reads plan.lock, problem collects problems.
package planner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/libs/engine"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
	"github.com/rollout-rl/rollout/services/planner/probe"
)

// Config sets the planner.
type Config struct {
	// Python is the interpreter of the workers' environment; the dry calls run in it.
	Python string
	// PythonPath is the folder of the Python package `rollout`; empty if it is installed.
	PythonPath string
	// Env is the environment of the dry calls.
	Env []string
	// Folder is where the planner keeps rows that it made and links to models of the hub. The
	// scheduler must be able to read it. Empty: a temporary folder.
	Folder string
	// Host is the memory of the host on which the scheduler starts workers; nil: unknown. It is
	// called for each plan.
	Host func(context.Context) Host
}

// Server is the planner.
type Server struct {
	planv1.UnimplementedPlannerServiceServer

	reader  *config.Reader
	prober  *probe.Prober
	engines map[string]engine.Capabilities
	inputs  planformat.Inputs
	host    func(context.Context) Host
}

// New returns a planner. It fails if the rules of the contract don't compile or the interpreter is
// not set.
func New(cfg Config) (*Server, error) {
	if cfg.Python == "" {
		return nil, errors.New("planner: the Python interpreter is not set")
	}
	reader, err := config.NewReader()
	if err != nil {
		return nil, err
	}
	engines, err := engine.All()
	if err != nil {
		return nil, fmt.Errorf("read the capabilities of the engines: %w", err)
	}
	python := cfg.Python
	if filepath.Base(python) != python { // a path, not a name to look up
		if python, err = filepath.Abs(python); err != nil {
			return nil, err
		}
	}
	return &Server{
		reader:  reader,
		host:    cfg.Host,
		engines: engines,
		inputs:  planformat.InputsOf(cmp.Or(cfg.Folder, filepath.Join(os.TempDir(), "rollout-planner"))),
		prober:  &probe.Prober{Python: python, PythonPath: cfg.PythonPath, Env: cfg.Env},
	}, nil
}
