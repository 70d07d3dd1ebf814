package planner

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
)

const environmentPath = "environment.path"

// environmentCheck plays a turn in the environment of the user.
type environmentCheck struct {
	config   *configv1.EnvironmentConfig
	findings findings
	files    *files
}

// read checks that the file of the environment exists.
func (d *environmentCheck) read() {
	if path := d.config.GetPath(); path != "" && d.findings.Readable(environmentPath) {
		file, _, _ := strings.Cut(path, ".py:")
		d.files.exists(environmentPath, file+".py", false)
	}
}

// request plays the first rows; nil without an environment or without rows.
func (d *environmentCheck) request(rows *input.Dataset) *probe.Environment {
	path := d.config.GetPath()
	if path == "" || !d.findings.Readable(environmentPath) || !d.findings.Readable("environment.args") || rows == nil || len(rows.First) == 0 {
		return nil
	}
	file, _, _ := strings.Cut(path, ".py:")
	if info, err := os.Stat(d.files.resolve(file + ".py")); err != nil || info.IsDir() {
		return nil // reported already
	}
	request := &probe.Environment{
		Plugin: path, BaseDir: d.files.baseDir, Args: d.config.GetArgs(), TimeoutSeconds: d.config.GetTurnTimeoutSeconds(),
		Rows: []json.RawMessage{},
	}
	for _, row := range rows.First {
		request.Rows = append(request.Rows, row.JSON)
	}
	return request
}

// answer reports what was wrong with the environment, or pins its files.
func (d *environmentCheck) answer(answer *probe.Answer, err error, pythonWorks bool) {
	var python *probe.Error
	switch {
	case errors.As(err, &python):
		d.findings.problems.Add(d.files.pythonProblem(python, environmentPath))
	case err != nil && pythonWorks: // then the environment ended the process
		d.findings.report(environmentPath, "ENVIRONMENT_EXITED", fmt.Sprintf("`%s` ended its process: %v", d.config.GetPath(), err),
			"run an episode of it in Python to see the reason")
	case err != nil || answer == nil || answer.Environment == nil: // reported already
	case answer.Environment.Error != nil:
		d.findings.problems.Add(d.files.pythonProblem(answer.Environment.Error, environmentPath))
	default:
		for _, file := range answer.Environment.Files {
			d.files.add(&planv1.Input{
				Role: planv1.InputRole_INPUT_ROLE_ENVIRONMENT, Path: input.Relative(d.files.baseDir, file, d.config.GetPath()),
			})
		}
	}
}
