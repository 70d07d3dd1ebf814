package planner

import (
	"fmt"
	"slices"
	"strings"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// teacherCheck reads the teacher of a distillation, or calls its endpoint.
type teacherCheck struct {
	*draft
	data  *dataCheck
	model *modelCheck

	files []*planv1.Input // of a teacher in a folder
}

// read reads the folder of a teacher. It must have the tokenizer of the trained model.
func (d *teacherCheck) read() {
	const field = "algorithm.distillation.teacher"
	path := d.Config.GetAlgorithm().GetDistillation().GetTeacher()
	if path == "" || !d.exists(field, path, true) {
		return
	}
	before := d.Problems.Len()
	folder := d.resolve(path)
	teacher := input.ReadModel(folder, path, field, &d.Problems)
	if teacher.Scores() {
		d.report(field, problem.BadModel, fmt.Sprintf("%s is a reward model (%s), which can't generate completions", path, teacher.Architecture),
			"use a language model as the teacher; a reward model belongs in `[reward.model]`")
		return
	}
	if d.model.model != nil && teacher.Embedded > 0 && d.model.model.Embedded > 0 && teacher.Embedded != d.model.model.Embedded {
		d.report(field, problem.BadModel, fmt.Sprintf("the vocabulary of the teacher has %d tokens, that of the model %d", teacher.Embedded, d.model.model.Embedded),
			"use a teacher with the same tokenizer")
	} else if d.model.model != nil {
		if difference := d.model.model.OtherTokens(teacher); difference != "" {
			d.report(field, problem.BadModel, "the teacher has a different vocabulary: "+difference,
				"use a teacher with the same tokenizer")
		}
	}
	if d.Problems.Len() > before {
		return
	}
	d.files = d.pin(planv1.InputRole_INPUT_ROLE_MODEL, teacher, folder, path)
}

// teachesItself warns if the teacher has the weights of the policy. Files must have their digests.
func (d *teacherCheck) teachesItself() {
	const field = "algorithm.distillation.teacher"
	if taught := weights(d.model.files); len(taught) == 0 || !slices.Equal(taught, weights(d.files)) {
		return
	}
	d.warnings.At(d.Place(field), problem.BadModel, field,
		fmt.Sprintf("the teacher %s has the same weights as `model.path`, so the loss is 0 and nothing is learned",
			d.Config.GetAlgorithm().GetDistillation().GetTeacher()),
		"use another model as the teacher, unless the run starts from a snapshot with `rollout run --from`")
}

// weights are the digests of a model's tensor files, without their names.
func weights(files []*planv1.Input) []string {
	var out []string
	for _, file := range files {
		if strings.HasSuffix(file.GetPath(), ".safetensors") {
			out = append(out, file.GetDigest())
		}
	}
	slices.Sort(out)
	return out
}

// request asks the endpoint of a teacher about the first prompt; nil without an endpoint, a usable
// model, or usable data.
func (d *teacherCheck) request() *probe.Teacher {
	endpoint := d.Config.GetAlgorithm().GetDistillation().GetEndpoint()
	const table = "algorithm.distillation.endpoint"
	if endpoint == nil || d.model.model == nil || d.data.train == nil || len(d.data.train.First) == 0 || !d.Readable(table) || !d.Problems.Empty() {
		return nil
	}
	return &probe.Teacher{
		Model: d.resolve(d.Config.GetModel().GetPath()), BaseURL: endpoint.GetBaseUrl(), Name: endpoint.GetModel(),
		APIKey: endpoint.GetApiKey(), Protocol: endpoint.GetProtocol(), TimeoutSeconds: endpoint.GetTimeoutSeconds(),
		Prompt: d.data.train.First[0].Prompt,
	}
}

// answer reports why the endpoint of a teacher failed.
func (d *teacherCheck) answer(answer *probe.Answer, err error) {
	switch {
	case err != nil:
		d.Problems.Add(probeProblem(err))
	case answer != nil && answer.Teacher != nil && answer.Teacher.Error != nil:
		d.Problems.Add(d.pythonProblem(answer.Teacher.Error, "algorithm.distillation.endpoint"))
	}
}
