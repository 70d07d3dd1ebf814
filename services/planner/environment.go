package planner

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/rollout-rl/rollout/libs/algorithm"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

const environmentPath, environmentArgs, environmentPython = "environment.path", "environment.args", "environment.python"

// environmentCheck plays a turn in an environment of several turns: a class of the user's, or one
// that rollout has for the kind. Of tools it only imports the functions, and MCP servers list
// theirs.
type environmentCheck struct {
	config   *configv1.EnvironmentConfig
	findings findings
	files    *files
	tools    []*planv1.Tool // of MCP servers
	saves    bool           // open episodes
}

// ours reports whether the class of the environment is rollout's.
func (d *environmentCheck) ours() bool {
	return d.config.GetPath() == "" && algorithm.Turns(&configv1.RunConfig{Environment: d.config})
}

// read checks that the file of the environment and its interpreter exist.
func (d *environmentCheck) read() {
	if python := d.config.GetPython(); python != "" && d.findings.Readable(environmentPython) {
		d.files.exists(environmentPython, python, false)
	}
	path := d.config.GetPath()
	if isInstalled(path) && d.config.GetPython() != "" {
		d.findings.report(environmentPython, problem.Conflict, fmt.Sprintf("`environment.python` has another interpreter than the package of `%s`", path),
			"remove it: packages with plugins are installed in the Python of the workers; or name a file of the environment")
	}
	if path != "" && !isInstalled(path) && d.findings.Readable(environmentPath) {
		d.files.exists(environmentPath, pluginFile(path), false)
	}
}

// request plays the first rows; nil without an environment or without rows.
func (d *environmentCheck) request(rows *input.Dataset) *probe.Environment {
	path, python := d.config.GetPath(), d.config.GetPython()
	if path == "" && !d.ours() || !d.findings.Readable(environmentPath) || !d.findings.Readable(environmentArgs) || rows == nil || len(rows.First) == 0 {
		return nil
	}
	if isInstalled(path) && python != "" || path != "" && !isInstalled(path) && !isFile(d.files.resolve(pluginFile(path))) || python != "" && !isFile(d.files.resolve(python)) {
		return nil // reported already
	}
	if python != "" {
		python = d.files.resolve(python)
	}
	request := &probe.Environment{
		Plugin: path, Kind: d.config.GetKind(), Python: python, BaseDir: d.files.baseDir, Args: d.config.GetArgs(), TimeoutSeconds: d.config.GetTurnTimeoutSeconds(),
		Rows: []json.RawMessage{},
	}
	for _, row := range rows.First {
		request.Rows = append(request.Rows, row.JSON)
	}
	return request
}

// answer reports what was wrong with the environment, or pins its files.
func (d *environmentCheck) answer(answer *probe.Answer, err error, pythonWorks bool) {
	field, name := environmentPath, d.config.GetPath()
	if d.ours() {
		field, name = environmentArgs, d.config.GetKind()
	}
	played := playedEnvironment{name, field, d.findings, d.files}.answer(answer, err, pythonWorks)
	if played == nil {
		return
	}
	d.saves = played.Saves
	for _, tool := range played.Tools {
		d.tools = append(d.tools, &planv1.Tool{
			Server: tool.Server, Name: tool.Name, Description: tool.Description, ParametersJson: tool.Parameters, Digest: tool.Digest,
		})
	}
	d.files.install(played.Plugins)
}

// playedEnvironment is an environment that Python has made and played. field is its key.
type playedEnvironment struct {
	name, field string
	findings    findings
	files       *files
}

// answer reports what was wrong, or pins the files of the environment and returns what Python
// found; nil if something was wrong.
func (p playedEnvironment) answer(answer *probe.Answer, err error, pythonWorks bool) *probe.EnvironmentAnswer {
	var python *probe.Error
	switch {
	case errors.As(err, &python):
		p.findings.problems.Add(p.files.pythonProblem(python, p.field))
		return nil
	case err != nil && pythonWorks: // then the environment ended the process
		p.findings.report(p.field, "ENVIRONMENT_EXITED", fmt.Sprintf("`%s` ended its process: %v", p.name, err),
			"run an episode of it in Python to see the reason")
		return nil
	case err != nil || answer == nil || answer.Environment == nil: // reported already
		return nil
	}
	found := answer.Environment
	if found.Error != nil {
		field := p.field
		if found.Error.Reason == "POLICY_UNFIT" {
			field = "model.path"
		}
		p.findings.problems.Add(p.files.pythonProblem(found.Error, field))
		return nil
	}
	for _, file := range found.Files {
		p.files.add(&planv1.Input{Role: planv1.InputRole_INPUT_ROLE_ENVIRONMENT, Path: input.Relative(p.files.baseDir, file, p.name)})
	}
	return found
}

// pluginFile is the file of `file.py:name` or `plugin.toml:NAME`.
func pluginFile(plugin string) string {
	file, _, _ := strings.Cut(plugin, ":")
	return file
}

// isInstalled reports whether a plugin is of an installed package, `DISTRIBUTION:NAME`.
func isInstalled(plugin string) bool {
	file := pluginFile(plugin)
	return planformat.IsPlugin(plugin) && !strings.HasSuffix(file, ".py") && !strings.HasSuffix(file, ".toml")
}

// isManifest reports whether a plugin is named by the manifest of a sidecar.
func isManifest(plugin string) bool { return strings.HasSuffix(pluginFile(plugin), ".toml") }

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.IsDir()
}
