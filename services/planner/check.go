package planner

import (
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/document"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// keys tells where the keys of a configuration are and which of them its text sets. config.Reading
// implements it.
type keys interface {
	Place(field string) document.Span
	Wrote(field string) bool
	Readable(field string) bool
}

// findings collects what checks find, at the keys of a configuration.
type findings struct {
	keys
	problems *problem.List
	warnings *problem.List // do not prevent the plan
}

// report adds a problem at a key.
func (f findings) report(field, reason, message, fix string) {
	f.problems.At(f.Place(field), reason, field, message, fix)
}

// warn adds a warning at a key.
func (f findings) warn(field, reason, message, fix string) {
	f.warnings.At(f.Place(field), reason, field, message, fix)
}

// pythonErrors makes a problem of an error from Python, at its line or at a key.
type pythonErrors interface {
	pythonProblem(e *probe.Error, field string) *planv1.Problem
}

// models finds the folders of models and pins their files.
type models interface {
	// exists reports whether a folder exists, and adds a problem at its key if not.
	exists(field, path string, folder bool) bool
	// resolve is the folder of a path in the configuration.
	resolve(path string) string
	// pin adds the files of a model to the inputs of the plan and returns them.
	pin(role planv1.InputRole, model *input.Model, folder, path string) []*planv1.Input
}
