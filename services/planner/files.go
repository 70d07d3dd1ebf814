package planner

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/nearest"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// files are the files that a configuration names, and those that its plan pins.
type files struct {
	findings findings
	baseDir  string
	made     planformat.Inputs                // the planner's folder of inputs
	models   map[string]fetched               // models of the hub by their path; without a folder: a problem was reported
	inputs   []*planv1.Input                  // of the plan
	plugins  map[string]*planv1.PluginPackage // of the plan, by name
}

// resolve is the file or folder of a path in the configuration.
func (f *files) resolve(path string) string {
	if model, ok := f.models[path]; ok {
		return model.folder
	}
	return input.Resolve(f.baseDir, path)
}

// locate is the file of an input.
func (f *files) locate(in *planv1.Input) string { return f.made.Locate(f.baseDir, in) }

// add adds a file to the inputs of the plan.
func (f *files) add(in *planv1.Input) { f.inputs = append(f.inputs, in) }

// addOnce adds an input unless the plan has it.
func (f *files) addOnce(in *planv1.Input) {
	if !slices.ContainsFunc(f.inputs, func(other *planv1.Input) bool {
		return other.GetRole() == in.GetRole() && other.GetPath() == in.GetPath()
	}) {
		f.add(in)
	}
}

// install adds installed packages with plugins to the plan.
func (f *files) install(packages []probe.Package) {
	for _, found := range packages {
		pinned := f.plugins[found.Name]
		if pinned == nil {
			pinned = &planv1.PluginPackage{Name: found.Name, Version: found.Version, Digest: found.Digest}
			f.plugins[found.Name] = pinned
		}
		if at, has := slices.BinarySearch(pinned.GetKinds(), found.Kind); !has {
			pinned.Kinds = slices.Insert(pinned.Kinds, at, found.Kind)
		}
	}
}

// packages are the installed packages of the plan, by name.
func (f *files) packages() []*planv1.PluginPackage {
	var out []*planv1.PluginPackage
	for _, name := range slices.Sorted(maps.Keys(f.plugins)) {
		out = append(out, f.plugins[name])
	}
	return out
}

// pin adds the files of a model to the inputs of the plan and returns them. They get their digests
// later.
func (f *files) pin(role planv1.InputRole, model *input.Model, folder, path string) []*planv1.Input {
	var pinned []*planv1.Input
	for _, name := range model.Files {
		file := &planv1.Input{Role: role, Path: input.Relative(f.baseDir, filepath.Join(folder, name), path)}
		if hub, ok := f.models[path]; ok {
			file.Path, file.Revision = path+"/"+name, hub.revision
		}
		pinned = append(pinned, file)
	}
	f.inputs = append(f.inputs, pinned...)
	return pinned
}

// hubURL is the address of a repository of the Hugging Face Hub.
var hubURL = regexp.MustCompile(`^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([\w.-]+/[\w.-]+)`)

// elsewhere suggests what to write instead of the address of a repository, or of a path in the home
// folder; "" for other texts.
func elsewhere(path string) string {
	if match := hubURL.FindStringSubmatch(path); match != nil {
		return fmt.Sprintf("write the name of the repository: %q", match[1])
	}
	rest, home := strings.CutPrefix(path, "~/")
	if !home {
		return ""
	}
	folder, err := os.UserHomeDir()
	if err != nil {
		folder = "/home/NAME"
	}
	return fmt.Sprintf("`~` is not expanded: write %q", filepath.Join(folder, rest))
}

// exists reports whether a file or folder exists, and adds a problem at its key if not.
func (f *files) exists(field, path string, folder bool) bool {
	if model, ok := f.models[path]; ok {
		return model.folder != ""
	}
	place := f.findings.Place(field)
	info, err := os.Stat(input.Resolve(f.baseDir, path))
	switch {
	case errors.Is(err, os.ErrNotExist):
		fix := "correct the path; it is relative to the folder of the configuration, " + f.baseDir
		if hint := elsewhere(path); hint != "" {
			fix = hint
		} else if similar := input.Similar(f.baseDir, path, nearest.To); similar != "" {
			fix = fmt.Sprintf("did you mean %q?", similar)
		} else if !strings.ContainsAny(path, "/.") {
			fix += fmt.Sprintf("; a name on the hub has its organization: \"ORG/%s\"", path)
		}
		what := "file"
		if folder {
			what = "folder"
		}
		f.findings.problems.At(place, problem.MissingFile, field, fmt.Sprintf("the %s %s does not exist", what, path), fix)
	case err != nil:
		f.findings.problems.At(place, problem.MissingFile, field, fmt.Sprintf("can't read %s: %v", path, errors.Unwrap(err)), "check its permissions")
	case info.IsDir() && !folder:
		f.findings.problems.At(place, problem.MissingFile, field, path+" is a folder, not a file", "use a file in it")
	case !info.IsDir() && folder:
		f.findings.problems.At(place, problem.MissingFile, field, path+" is a file, not a folder", "use the folder that contains config.json")
	default:
		return true
	}
	return false
}

// pythonProblem places an error from Python at its line, or at the key of the plugin.
func (f *files) pythonProblem(e *probe.Error, field string) *planv1.Problem {
	p := &planv1.Problem{Reason: e.Reason, Field: field, Message: e.Message, Fix: e.Fix}
	if e.File == "" || e.Line == 0 && e.File != "" && filepath.Ext(e.File) == ".py" {
		var list problem.List
		list.At(f.findings.Place(field), e.Reason, field, e.Message, e.Fix)
		return list.Sorted()[0]
	}
	p.File = input.Relative(f.baseDir, e.File, "")
	p.Line, p.Column, p.Excerpt = e.Line, e.Column, problem.Excerpt(line(e.File, e.Line))
	if text := strings.TrimSpace(e.Text); text != "" && strings.Contains(p.Excerpt, text) && e.Reason != "REWARD_IMPORT" && e.Reason != "ENVIRONMENT_IMPORT" {
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
