package planner

import (
	"context"
	"fmt"
	"maps"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// defaultEngine is in the environment of the other workers.
const defaultEngine = "transformers"

// engineCheck asks the interpreter of the inference workers for the engine.
type engineCheck struct {
	config   *configv1.EngineConfig
	findings findings
	files    *files
	prober   *probe.Prober
}

// read reports an environment that can't run the engine, and puts the capabilities that it declares
// into those that the model is checked with.
func (d *engineCheck) read(ctx context.Context, model *modelCheck) error {
	kind, path := d.config.GetKind(), d.config.GetPython()
	if path == "" && (kind == "" || kind == defaultEngine || d.config.GetUrl() != "") {
		return nil
	}
	field, python := "engine.kind", d.prober.Python
	if path != "" {
		field = "engine.python"
		if !d.files.exists(field, path, false) {
			return nil
		}
		python = d.files.resolve(path)
	}
	answer, err := d.prober.Engine(ctx, python, kind)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		d.findings.report(field, problem.Probe, fmt.Sprintf("%s can't describe the engine `%s`: %v", python, kind, err),
			"install the package rollout-workers of this version into its environment")
	case answer.Missing != "" && d.config.GetUrl() == "": // the package is in the environment of a server
		d.findings.report(field, problem.PackageMissing, fmt.Sprintf("the engine `%s` needs the package %s, which %s lacks", kind, answer.Missing, python),
			fmt.Sprintf("name an interpreter with both in `engine.python`; in a checkout, `make engine-%s` makes `.tools/%s/bin/python`", kind, kind))
	default:
		model.engines = maps.Clone(model.engines)
		model.engines[kind] = answer.Capabilities
	}
	return nil
}
