package planner

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/engine"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// modelCheck reads the folder of the trained model and compares the configuration with it.
type modelCheck struct {
	*draft
	engines map[string]engine.Capabilities // by `engine.kind`

	model *input.Model    // nil without a usable model
	files []*planv1.Input // of the model
}

func (d *modelCheck) read() {
	path := d.Config.GetModel().GetPath()
	d.checkEngine()
	if path == "" || !d.exists("model.path", path, true) {
		return
	}
	before := d.Problems.Len()
	folder := d.resolve(path)
	model := input.ReadModel(folder, path, "model.path", &d.Problems)
	if d.Config.GetModel().GetChatTemplate() && !model.ChatTemplate {
		d.report("model.chat_template", problem.BadModel, fmt.Sprintf("`model.chat_template` is set, but the tokenizer of %s has no chat template", path),
			"remove `chat_template`, or use an instruction-tuned model")
	}
	if algorithm.Generates(d.Config) && model.Scores() {
		d.report("model.path", problem.BadModel, fmt.Sprintf("%s is a reward model (%s), which can't generate completions", path, model.Architecture),
			"use a language model; a reward model belongs in `[reward.model]`")
	}
	if model.Quantized != "" {
		d.report("model.path", problem.BadModel, fmt.Sprintf("the weights of %s are quantized (%s) and can't be trained", path, model.Quantized),
			"use the weights before quantization")
	}
	kind := d.Config.GetEngine().GetKind()
	if why := model.Undecodable(d.engine()); why != "" {
		d.report("model.path", problem.BadModel, fmt.Sprintf("the engine `%s` can't decode %s: %s", kind, path, why),
			"choose a model whose layers are "+strings.Join(d.engine().Attention, ", "))
	}
	d.fitContext(model)
	d.fitTensors(model)
	if d.Problems.Len() > before {
		return
	}
	d.model = model
	d.files = d.pin(planv1.InputRole_INPUT_ROLE_MODEL, model, folder, path)
}

// engine is what the chosen engine can do.
func (d *modelCheck) engine() engine.Capabilities { return d.engines[d.Config.GetEngine().GetKind()] }

// checkEngine compares the configuration with what the engine can do.
func (d *modelCheck) checkEngine() {
	kind, can := d.Config.GetEngine().GetKind(), d.engine()
	if d.Config.GetDeterministic() && !can.Deterministic {
		if d.Wrote("deterministic") {
			d.report("deterministic", problem.Conflict, fmt.Sprintf("`deterministic = true`, but the engine `%s` does not give the same bits each time", kind), "remove `deterministic`")
		}
		d.Config.Deterministic = proto.Bool(false)
	}
	for field, used := range map[string]bool{
		"sampling.temperature": d.Config.GetSampling().GetTemperature() == 0 && algorithm.Samples(d.Config),
		"eval.temperature":     d.Config.GetEval().GetTemperature() == 0 && d.Config.GetEval().GetEverySteps() > 0 && d.Config.GetReward() != nil,
	} {
		if used && !can.Greedy {
			d.report(field, problem.Conflict, fmt.Sprintf("`%s` is 0, and the engine `%s` can't take the most likely token", field, kind), "write a number above 0")
		}
	}
}

// fitContext compares the longest sequence with what model and engine allow. A default is lowered
// to it; a number in the configuration is reported.
func (d *modelCheck) fitContext(model *input.Model) {
	engine := d.Config.GetEngine()
	positions, why := model.Context(d.engine())
	if positions == 0 || int64(engine.GetMaxModelLen()) <= positions {
		return
	}
	if d.Wrote("engine.max_model_len") {
		d.report("engine.max_model_len", problem.OutOfRange, fmt.Sprintf("`engine.max_model_len` is %d, but %s", engine.GetMaxModelLen(), why),
			fmt.Sprintf("write `max_model_len = %d` or less", positions))
		return
	}
	engine.MaxModelLen = proto.Uint32(uint32(positions))
	if tokens := d.Config.GetSampling().GetMaxTokens(); int64(tokens) >= positions && algorithm.Samples(d.Config) {
		d.report("sampling.max_tokens", problem.OutOfRange, fmt.Sprintf("`sampling.max_tokens` is %d, but %s, for prompt and completion together", tokens, why),
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
	for _, pattern := range d.Config.GetTrain().GetFreeze() {
		fits, err := model.Match(pattern)
		for _, name := range fits {
			frozen[name] = true
		}
		switch {
		case err != nil:
			d.report("train.freeze", problem.BadValue, fmt.Sprintf("%q is not a valid pattern: a bracket is not closed", pattern),
				"use names with `*`, `?`, and `[0-3]`")
		case len(fits) == 0:
			d.report("train.freeze", problem.BadValue, fmt.Sprintf("%q matches no tensor of the model", pattern),
				fmt.Sprintf("tensors are named like %q", slices.Min(model.Tensors)))
		}
	}
	if len(frozen) == len(model.Tensors) {
		d.report("train.freeze", problem.BadValue, "`train.freeze` matches every tensor of the model, so nothing is trained",
			"remove the patterns of the tensors to train")
	}
	for _, target := range d.Config.GetLora().GetTargets() {
		if !model.HasLayer(target) {
			d.report("lora.targets", problem.BadValue, fmt.Sprintf("the model has no layer %q", target),
				"it has "+strings.Join(model.Layers(), ", "))
		}
	}
}
