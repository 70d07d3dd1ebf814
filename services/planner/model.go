package planner

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/nearest"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

func (d *draft) readModel(path string) {
	if path == "" || !d.exists("model.path", path, true) {
		return
	}
	before := d.Problems.Len()
	folder := input.Resolve(d.baseDir, path)
	model := input.ReadModel(folder, path, "model.path", &d.Problems)
	if d.Config.GetModel().GetChatTemplate() && !model.ChatTemplate {
		d.Problems.At(d.Place("model.chat_template"), problem.BadModel, "model.chat_template",
			fmt.Sprintf("`model.chat_template` is set, but the tokenizer of %s has no chat template", path),
			"remove `chat_template`, or use an instruction-tuned model")
	}
	if algorithm.Generates(d.Config) && model.Scores() {
		d.Problems.At(d.Place("model.path"), problem.BadModel, "model.path", fmt.Sprintf("%s is a reward model (%s): it scores completions and writes none", path, model.Architecture),
			"name a language model; a reward model is for `[reward.model]`")
	}
	if model.Quantised != "" {
		d.Problems.At(d.Place("model.path"), problem.BadModel, "model.path", fmt.Sprintf("the weights of %s are quantised (%s): they can't be trained", path, model.Quantised),
			"take the weights that they were made from")
	}
	if model.Unsampled != "" {
		d.Problems.At(d.Place("model.path"), problem.BadModel, "model.path", fmt.Sprintf("workers can't decode %s: %s", path, model.Unsampled),
			"take a decoder with plain or windowed attention")
	}
	d.fitContext(model)
	d.fitTensors(model)
	if d.Problems.Len() > before {
		return
	}
	d.model = model
	d.policy = d.pin(planv1.InputRole_INPUT_ROLE_MODEL, model, folder, path)
}

// pin adds a model's files to what is pinned, and returns them; their digests come later.
func (d *draft) pin(role planv1.InputRole, model *input.Model, folder, path string) []*planv1.Input {
	var files []*planv1.Input
	for _, name := range model.Files {
		files = append(files, &planv1.Input{Role: role, Path: input.Relative(d.baseDir, filepath.Join(folder, name), path)})
	}
	d.inputs = append(d.inputs, files...)
	return files
}

// fitContext holds the longest sequence against what the model allows. The default is lowered to that; a number that the user
// wrote is not.
func (d *draft) fitContext(model *input.Model) {
	engine, positions := d.Config.GetEngine(), model.Context
	if positions == 0 || int64(engine.GetMaxModelLen()) <= positions {
		return
	}
	if d.Wrote("engine.max_model_len") {
		d.Problems.At(d.Place("engine.max_model_len"), problem.OutOfRange, "engine.max_model_len",
			fmt.Sprintf("`engine.max_model_len` is %d, but %s", engine.GetMaxModelLen(), model.Bound),
			fmt.Sprintf("write `max_model_len = %d` or less", positions))
		return
	}
	engine.MaxModelLen = proto.Uint32(uint32(positions))
	if tokens := d.Config.GetSampling().GetMaxTokens(); int64(tokens) >= positions && algorithm.Samples(d.Config) {
		d.Problems.At(d.Place("sampling.max_tokens"), problem.OutOfRange, "sampling.max_tokens",
			fmt.Sprintf("`sampling.max_tokens` is %d, but %s, for prompt and completion together", tokens, model.Bound),
			fmt.Sprintf("write a number below %d", positions))
	}
}

// fitTensors holds the names of tensors and layers in the configuration against the model's files.
func (d *draft) fitTensors(model *input.Model) {
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
			d.Problems.At(d.Place("train.freeze"), problem.BadValue, "train.freeze", fmt.Sprintf("%q is no pattern: a bracket is not closed", pattern),
				"write names with `*`, `?` and `[0-3]`")
		case len(fits) == 0:
			d.Problems.At(d.Place("train.freeze"), problem.BadValue, "train.freeze", fmt.Sprintf("%q matches no tensor of the model", pattern),
				fmt.Sprintf("tensors are named like %q", slices.Min(model.Tensors)))
		}
	}
	if len(frozen) == len(model.Tensors) {
		d.Problems.At(d.Place("train.freeze"), problem.BadValue, "train.freeze", "`train.freeze` matches every tensor of the model: nothing is left to train",
			"leave out what is to be trained")
	}
	for _, target := range d.Config.GetLora().GetTargets() {
		if !model.HasLayer(target) {
			d.Problems.At(d.Place("lora.targets"), problem.BadValue, "lora.targets", fmt.Sprintf("the model has no layer %q", target),
				"it has "+strings.Join(model.Layers(), ", "))
		}
	}
}

// hubName is how models are called on the Hugging Face Hub.
var hubName = regexp.MustCompile(`^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$`)

// download says how to get a model that is called by its name on the hub; "" for what is a path into a folder that is there.
func (d *draft) download(path string) string {
	owner, name, _ := strings.Cut(path, "/")
	if _, err := os.Stat(input.Resolve(d.baseDir, owner)); err == nil || !hubName.MatchString(path) {
		return ""
	}
	return fmt.Sprintf("models are not downloaded: name a folder. For a model of the Hugging Face Hub run `hf download %s --local-dir %s` (package huggingface_hub) and name %q",
		path, filepath.Join(d.baseDir, name), name)
}

// exists reports whether a file or folder is there, and says at the field that names it where it is not.
func (d *draft) exists(field, path string, folder bool) bool {
	place := d.Place(field)
	info, err := os.Stat(input.Resolve(d.baseDir, path))
	switch {
	case errors.Is(err, os.ErrNotExist):
		fix := "correct the path; it starts at the folder of the configuration, " + d.baseDir
		if similar := input.Similar(d.baseDir, path, nearest.To); similar != "" {
			fix = fmt.Sprintf("did you mean %q?", similar)
		}
		what := "file"
		if folder {
			if download := d.download(path); download != "" {
				fix = download
			}
			what = "folder"
		}
		d.Problems.At(place, problem.MissingFile, field, fmt.Sprintf("there is no %s %s", what, path), fix)
	case err != nil:
		d.Problems.At(place, problem.MissingFile, field, fmt.Sprintf("can't read %s: %v", path, errors.Unwrap(err)), "check its permissions")
	case info.IsDir() && !folder:
		d.Problems.At(place, problem.MissingFile, field, path+" is a folder, not a file", "name a file in it")
	case !info.IsDir() && folder:
		d.Problems.At(place, problem.MissingFile, field, path+" is a file, not a folder", "name the folder that holds config.json")
	default:
		return true
	}
	return false
}
