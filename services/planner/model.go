package planner

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/engine"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// modelCheck reads the folder of the trained model and compares the configuration with it.
type modelCheck struct {
	config   *configv1.RunConfig
	findings findings
	models   models
	engines  map[string]engine.Capabilities // by `engine.kind`

	model *input.Model    // nil without a usable model
	files []*planv1.Input // of the model
}

func (d *modelCheck) read() {
	path := d.config.GetModel().GetPath()
	d.checkEngine()
	if path == "" || !d.models.exists("model.path", path, true) {
		return
	}
	before := d.findings.problems.Len()
	folder := d.models.resolve(path)
	if d.config.GetMultistep() != nil {
		model := input.ReadPolicy(folder, path, "model.path", d.findings.problems)
		d.fitTensors(model)
		if d.findings.problems.Len() == before {
			d.model, d.files = model, d.models.pin(planv1.InputRole_INPUT_ROLE_MODEL, model, folder, path)
		}
		return
	}
	model := input.ReadModel(folder, path, "model.path", d.findings.problems)
	if d.config.GetModel().GetChatTemplate() && !model.ChatTemplate {
		d.findings.report("model.chat_template", problem.BadModel, fmt.Sprintf("`model.chat_template` is set, but the tokenizer of %s has no chat template", path),
			"remove `chat_template`, or use an instruction-tuned model")
	}
	if algorithm.Generates(d.config) && model.Scores() {
		d.findings.report("model.path", problem.BadModel, fmt.Sprintf("%s is a reward model (%s), which can't generate completions", path, model.Architecture),
			"use a language model; a reward model belongs in `[reward.model]`")
	}
	if model.Quantized != "" {
		d.findings.report("model.path", problem.BadModel, fmt.Sprintf("the weights of %s are quantized (%s) and can't be trained", path, model.Quantized),
			"use the weights before quantization")
	}
	kind := d.config.GetEngine().GetKind()
	if why := model.Undecodable(d.engine()); why != "" {
		d.findings.report("model.path", problem.BadModel, fmt.Sprintf("the engine `%s` can't decode %s: %s", kind, path, why),
			"choose a model whose layers are "+strings.Join(d.engine().Attention, ", "))
	}
	d.fitContext(model)
	d.fitVerification(folder, model)
	d.fitTensors(model)
	if d.findings.problems.Len() > before {
		return
	}
	d.model = model
	d.files = d.models.pin(planv1.InputRole_INPUT_ROLE_MODEL, model, folder, path)
}

// modelContext is the longest sequence that model and engine allow, and the reason; 0 if nothing
// limits it.
type modelContext struct {
	positions int64
	why       string
}

// context is that of the usable model; the zero value without one.
func (d *modelCheck) context() modelContext {
	if d.model == nil {
		return modelContext{}
	}
	positions, why := d.model.Context(d.engine())
	return modelContext{positions, why}
}

// engine is what the chosen engine can do.
func (d *modelCheck) engine() engine.Capabilities { return d.engines[d.config.GetEngine().GetKind()] }

// checkEngine compares the configuration with what the engine can do.
func (d *modelCheck) checkEngine() {
	kind, can := d.config.GetEngine().GetKind(), d.engine()
	if d.config.GetDeterministic() && !can.Deterministic {
		if d.findings.Wrote("deterministic") {
			d.findings.report("deterministic", problem.Conflict, fmt.Sprintf("`deterministic = true`, but the engine `%s` does not give the same bits each time", kind), "remove `deterministic`")
		}
		d.config.Deterministic = proto.Bool(false)
	}
	if verify := d.config.GetWeights().GetVerify(); !slices.Contains(can.Verifies, verify) {
		d.findings.report("weights.verify", problem.Conflict, fmt.Sprintf("`weights.verify` is `%s`, but the tensors of the engine `%s` can't be read back like that", verify, kind),
			"write one of "+strings.Join(can.Verifies, ", "))
	}
	for field, used := range map[string]bool{
		"sampling.temperature": d.config.GetSampling().GetTemperature() == 0 && algorithm.Samples(d.config),
		"eval.temperature":     d.config.GetEval().GetTemperature() == 0 && d.config.GetEval().GetEverySteps() > 0 && algorithm.Rewarded(d.config),
	} {
		if used && !can.Greedy {
			d.findings.report(field, problem.Conflict, fmt.Sprintf("`%s` is 0, and the engine `%s` can't take the most likely token", field, kind), "write a number above 0")
		}
	}
}

// sampledBytes is the size of a model from which workers by default verify random tensors of it.
const sampledBytes = 2 << 30

// fitVerification lets workers verify random tensors of large models, unless the configuration says
// how.
func (d *modelCheck) fitVerification(folder string, model *input.Model) {
	bytes := int64(0)
	for _, name := range model.Files {
		if info, err := os.Stat(filepath.Join(folder, name)); err == nil {
			bytes += info.Size()
		}
	}
	if bytes > sampledBytes && !d.findings.Wrote("weights.verify") && slices.Contains(d.engine().Verifies, "sampled") {
		d.config.Weights.Verify = proto.String("sampled")
	}
}

// fitContext compares the longest sequence with what model and engine allow. A default is lowered
// to it; a number in the configuration is reported.
func (d *modelCheck) fitContext(model *input.Model) {
	engine := d.config.GetEngine()
	positions, why := model.Context(d.engine())
	if positions == 0 || int64(engine.GetMaxModelLen()) <= positions {
		return
	}
	if d.findings.Wrote("engine.max_model_len") {
		d.findings.report("engine.max_model_len", problem.OutOfRange, fmt.Sprintf("`engine.max_model_len` is %d, but %s", engine.GetMaxModelLen(), why),
			fmt.Sprintf("write `max_model_len = %d` or less", positions))
		return
	}
	engine.MaxModelLen = proto.Uint32(uint32(positions))
	if tokens := d.config.GetSampling().GetMaxTokens(); int64(tokens) >= positions && algorithm.Samples(d.config) {
		d.findings.report("sampling.max_tokens", problem.OutOfRange, fmt.Sprintf("`sampling.max_tokens` is %d, but %s, for prompt and completion together", tokens, why),
			fmt.Sprintf("write a number below %d", positions))
	}
}

// fitTensors compares the names of tensors and layers in the configuration with the files of the
// model.
func (d *modelCheck) fitTensors(model *input.Model) {
	if len(model.Tensors) == 0 {
		return
	}
	frozen := map[string]bool{}
	for _, pattern := range d.config.GetTrain().GetFreeze() {
		fits, err := model.Match(pattern)
		for _, name := range fits {
			frozen[name] = true
		}
		switch {
		case err != nil:
			d.findings.report("train.freeze", problem.BadValue, fmt.Sprintf("%q is not a valid pattern: a bracket is not closed", pattern),
				"use names with `*`, `?`, and `[0-3]`")
		case len(fits) == 0:
			d.findings.report("train.freeze", problem.BadValue, fmt.Sprintf("%q matches no tensor of the model", pattern),
				fmt.Sprintf("tensors are named like %q", slices.Min(model.Tensors)))
		}
	}
	if len(frozen) == len(model.Tensors) {
		d.findings.report("train.freeze", problem.BadValue, "`train.freeze` matches every tensor of the model, so nothing is trained",
			"remove the patterns of the tensors to train")
	}
	for _, target := range d.config.GetLora().GetTargets() {
		if !model.HasLayer(target) {
			d.findings.report("lora.targets", problem.BadValue, fmt.Sprintf("the model has no layer %q", target),
				"it has "+strings.Join(model.Layers(), ", "))
		}
	}
}
