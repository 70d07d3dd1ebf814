package planner

import (
	"encoding/json"
	"regexp"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
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
	playedEnvironment{d.config.GetMultistep().GetEnvironment(), multistepEnvironment, d.findings, d.files}.answer(answer, err, pythonWorks)
}
