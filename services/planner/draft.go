package planner

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/rollout-rl/rollout/libs/nearest"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// draft is a plan before it is complete: the configuration, the problems found so far, and the
// files that the plan pins. Each check has its own type, reads the configuration here, and reports
// here.
type draft struct {
	*config.Reading
	baseDir  string
	made     planformat.Inputs       // the planner's folder of inputs
	prepared map[string]preparedRows // rows that are not in a file of the user, by the key of the data
	models   map[string]fetched      // models of the hub by their path; without a folder: a problem was reported
	inputs   []*planv1.Input
	warnings problem.List // do not prevent the plan
}

// report adds a problem at the place of a field.
func (d *draft) report(field, reason, message, fix string) {
	d.Problems.At(d.Place(field), reason, field, message, fix)
}

// resolve is the file or folder of a path in the configuration.
func (d *draft) resolve(path string) string {
	if model, ok := d.models[path]; ok {
		return model.folder
	}
	return input.Resolve(d.baseDir, path)
}

// locate is the file of an input.
func (d *draft) locate(in *planv1.Input) string { return d.made.Locate(d.baseDir, in) }

// pin adds the files of a model to the inputs of the plan and returns them. They get their digests
// later.
func (d *draft) pin(role planv1.InputRole, model *input.Model, folder, path string) []*planv1.Input {
	var files []*planv1.Input
	for _, name := range model.Files {
		file := &planv1.Input{Role: role, Path: input.Relative(d.baseDir, filepath.Join(folder, name), path)}
		if hub, ok := d.models[path]; ok {
			file.Path, file.Revision = path+"/"+name, hub.revision
		}
		files = append(files, file)
	}
	d.inputs = append(d.inputs, files...)
	return files
}

// Learning rates of Adam outside of these bounds are almost always mistakes: pretraining uses up to
// 6e-3 (arXiv 2203.15556), adapters up to 2e-3 (arXiv 2106.09685), and RL on language models 1e-7
// to 1e-5.
const (
	leastRate = 1e-9
	mostRate  = 1e-2
)

// learningRate warns of a learning rate far outside of the usual range.
func (d *draft) learningRate() {
	const field = "train.learning_rate"
	rate := d.Config.GetTrain().GetLearningRate()
	if !d.Readable(field) || rate == 0 || rate > leastRate && rate < mostRate {
		return
	}
	effect, usual := "the first updates will destroy the model", "1e-6 for RL, 1e-5 for SFT, 1e-4 with [lora]"
	if rate <= leastRate {
		effect = "the model will hardly change"
	}
	d.warnings.At(d.Place(field), problem.UnusualValue, field,
		fmt.Sprintf("`%s` = %g is far outside of the usual range of AdamW: %s", field, rate, effect), "start from the usual: "+usual)
}

// exists reports whether a file or folder exists, and adds a problem at its key if not.
func (d *draft) exists(field, path string, folder bool) bool {
	if model, ok := d.models[path]; ok {
		return model.folder != ""
	}
	place := d.Place(field)
	info, err := os.Stat(input.Resolve(d.baseDir, path))
	switch {
	case errors.Is(err, os.ErrNotExist):
		fix := "correct the path; it is relative to the folder of the configuration, " + d.baseDir
		if similar := input.Similar(d.baseDir, path, nearest.To); similar != "" {
			fix = fmt.Sprintf("did you mean %q?", similar)
		}
		what := "file"
		if folder {
			what = "folder"
		}
		d.Problems.At(place, problem.MissingFile, field, fmt.Sprintf("the %s %s does not exist", what, path), fix)
	case err != nil:
		d.Problems.At(place, problem.MissingFile, field, fmt.Sprintf("can't read %s: %v", path, errors.Unwrap(err)), "check its permissions")
	case info.IsDir() && !folder:
		d.Problems.At(place, problem.MissingFile, field, path+" is a folder, not a file", "use a file in it")
	case !info.IsDir() && folder:
		d.Problems.At(place, problem.MissingFile, field, path+" is a file, not a folder", "use the folder that contains config.json")
	default:
		return true
	}
	return false
}

// pythonProblem places an error from Python at its line, or at the key of the plugin.
func (d *draft) pythonProblem(e *probe.Error, field string) *planv1.Problem {
	p := &planv1.Problem{Reason: e.Reason, Field: field, Message: e.Message, Fix: e.Fix}
	if e.File == "" || e.Line == 0 && e.File != "" && filepath.Ext(e.File) == ".py" {
		var list problem.List
		list.At(d.Place(field), e.Reason, field, e.Message, e.Fix)
		return list.Sorted()[0]
	}
	p.File = input.Relative(d.baseDir, e.File, "")
	p.Line, p.Column, p.Excerpt = e.Line, e.Column, problem.Excerpt(line(e.File, e.Line))
	if text := strings.TrimSpace(e.Text); text != "" && strings.Contains(p.Excerpt, text) && e.Reason != "REWARD_IMPORT" {
		p.Text = text
	}
	return p
}

func line(file string, number uint32) string {
	data, err := os.ReadFile(file)
	lines := strings.Split(string(data), "\n")
	if err != nil || number == 0 || int(number) > len(lines) {
		return ""
	}
	return strings.TrimRight(lines[number-1], "\r")
}

func probeProblem(err error) *planv1.Problem {
	return &planv1.Problem{
		Reason: problem.Probe, Message: "the Python probe failed: " + err.Error(),
		Fix: "check the Python environment of the workers: `python -m rollout.probe` must run in it",
	}
}
