package plan

import (
	"path/filepath"
	"strings"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// Inputs is a folder of inputs: what the planner made or downloaded for a plan (docs/wire.md). The
// planner has one, and each run has one in its folder with its own inputs.
//
//	inputs/rows/blake3-<hex>.jsonl             rows, by their digest
//	inputs/models/<org>--<name>/<commit>/      a model of the hub
//
// python/rollout/inputs.py is the same code for workers.
type Inputs string

// InputsOf is the folder of inputs in the folder of a run or of the planner.
func InputsOf(folder string) Inputs { return Inputs(filepath.Join(folder, "inputs")) }

// Rows is the file of the rows of an input.
func (f Inputs) Rows(digest string) string {
	return filepath.Join(string(f), "rows", digest+".jsonl")
}

// Model is the folder of a model. name is as in the configuration, `org/name` or
// `org/name@revision`.
func (f Inputs) Model(name, commit string) string {
	repository, _, _ := strings.Cut(name, "@")
	return filepath.Join(string(f), "models", strings.ReplaceAll(repository, "/", "--"), commit)
}

// Made reports whether the planner made or downloaded an input, so that it is in a folder of
// inputs.
func Made(in *planv1.Input) bool { return len(in.GetSources()) > 0 || in.GetRevision() != "" }

// ModelOf is the name of the model that a file of the hub belongs to, as in the configuration.
func ModelOf(in *planv1.Input) string {
	parts := strings.SplitN(in.GetPath(), "/", 3)
	return strings.Join(parts[:min(2, len(parts))], "/")
}

// Locate is the file of an input: in the folder of inputs if the planner made or downloaded it,
// else where the user has it.
func (f Inputs) Locate(baseDir string, in *planv1.Input) string {
	switch {
	case len(in.GetSources()) > 0:
		return f.Rows(in.GetDigest())
	case in.GetRevision() != "":
		name := ModelOf(in)
		return filepath.Join(f.Model(name, in.GetRevision()), filepath.FromSlash(strings.TrimPrefix(in.GetPath(), name+"/")))
	case filepath.IsAbs(filepath.FromSlash(in.GetPath())):
		return filepath.FromSlash(in.GetPath())
	}
	return filepath.Join(baseDir, filepath.FromSlash(in.GetPath()))
}
