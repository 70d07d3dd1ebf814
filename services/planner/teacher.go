package planner

import (
	"fmt"
	"path/filepath"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// readTeacher reads the folder of a teacher's model, whose tokens must be those of the model that is trained.
func (d *draft) readTeacher(path string) {
	const field = "algorithm.distillation.teacher"
	if path == "" || !d.exists(field, path, true) {
		return
	}
	before := d.Problems.Len()
	folder := input.Resolve(d.baseDir, path)
	teacher := input.ReadModel(folder, path, &d.Problems)
	if d.model != nil && teacher.Embedded > 0 && d.model.Embedded > 0 && teacher.Embedded != d.model.Embedded {
		d.Problems.At(d.Place(field), problem.BadModel, field,
			fmt.Sprintf("the teacher has a vocabulary of %d tokens, the model one of %d", teacher.Embedded, d.model.Embedded),
			"take a teacher with the same tokenizer")
	}
	if d.Problems.Len() > before {
		return
	}
	for _, name := range teacher.Files {
		d.inputs = append(d.inputs, &planv1.Input{
			Role: planv1.InputRole_INPUT_ROLE_MODEL, Path: input.Relative(d.baseDir, filepath.Join(folder, name), path),
		})
	}
}
