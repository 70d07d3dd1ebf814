package planner

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
)

const multistepEnvironment = "multistep.environment"

// isClass matches a class of the user's; other environments are ids of gymnasium.
var isClass = regexp.MustCompile(`^[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*$`)

// multistepCheck makes the environment of a policy that acts for many steps, and compares the two.
type multistepCheck struct {
	config   *configv1.RunConfig
	findings findings
	files    *files
}

// read checks that the file of the environment exists.
func (d *multistepCheck) read() {
	if name := d.config.GetMultistep().GetEnvironment(); isClass.MatchString(name) && d.findings.Readable(multistepEnvironment) {
		d.files.exists(multistepEnvironment, pluginFile(name), false)
	}
}

// request resets the environment with the first row; nil without one, and without a usable policy.
func (d *multistepCheck) request(rows *input.Dataset, model *input.Model) *probe.Environment {
	table := d.config.GetMultistep()
	name := table.GetEnvironment()
	if name == "" || model == nil || rows == nil || len(rows.First) == 0 || !d.findings.Readable("multistep") {
		return nil
	}
	if isClass.MatchString(name) && !isFile(d.files.resolve(pluginFile(name))) {
		return nil // reported already
	}
	return &probe.Environment{
		Plugin: name, Kind: "multistep", BaseDir: d.files.baseDir, Args: table.GetArgs(), TimeoutSeconds: d.config.GetEnvironment().GetTurnTimeoutSeconds(),
		Rows: []json.RawMessage{rows.First[0].JSON}, Model: d.files.resolve(d.config.GetModel().GetPath()), Chunk: table.GetChunk(), RewardType: table.GetRewardType(),
	}
}

// answer reports what was wrong with the environment or the policy, or pins the files of the
// environment.
func (d *multistepCheck) answer(answer *probe.Answer, err error, pythonWorks bool) {
	name := d.config.GetMultistep().GetEnvironment()
	var python *probe.Error
	switch {
	case errors.As(err, &python):
		d.findings.problems.Add(d.files.pythonProblem(python, multistepEnvironment))
	case err != nil && pythonWorks: // then the environment ended the process
		d.findings.report(multistepEnvironment, "ENVIRONMENT_EXITED", fmt.Sprintf("`%s` ended its process: %v", name, err),
			"run an episode of it in Python to see the reason")
	case err != nil || answer == nil || answer.Environment == nil: // reported already
	case answer.Environment.Error != nil:
		field := multistepEnvironment
		if answer.Environment.Error.Reason == "POLICY_UNFIT" {
			field = "model.path"
		}
		d.findings.problems.Add(d.files.pythonProblem(answer.Environment.Error, field))
	default:
		for _, file := range answer.Environment.Files {
			d.files.add(&planv1.Input{
				Role: planv1.InputRole_INPUT_ROLE_ENVIRONMENT, Path: input.Relative(d.files.baseDir, file, name),
			})
		}
	}
}
