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

// read reads the folder of a teacher's model, whose tokens must be those of the model that is trained.
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
		d.report(field, problem.BadModel, fmt.Sprintf("%s is a reward model (%s): it scores completions and writes none", path, teacher.Architecture),
			"name a language model as the teacher; a reward model is for `[reward.model]`")
		return
	}
	if d.model.model != nil && teacher.Embedded > 0 && d.model.model.Embedded > 0 && teacher.Embedded != d.model.model.Embedded {
		d.report(field, problem.BadModel, fmt.Sprintf("the teacher has a vocabulary of %d tokens, the model one of %d", teacher.Embedded, d.model.model.Embedded),
			"take a teacher with the same tokenizer")
	} else if d.model.model != nil {
		if difference := d.model.model.OtherTokens(teacher); difference != "" {
			d.report(field, problem.BadModel, "the teacher has another vocabulary: "+difference,
				"take a teacher with the same tokenizer")
		}
	}
	if d.Problems.Len() > before {
		return
	}
	d.files = d.pin(planv1.InputRole_INPUT_ROLE_MODEL, teacher, folder, path)
}

// teachesItself warns of a teacher whose weights are the policy's own: the two agree on every token. Files must have their digests.
func (d *teacherCheck) teachesItself() {
	const field = "algorithm.distillation.teacher"
	if taught := weights(d.model.files); len(taught) == 0 || !slices.Equal(taught, weights(d.files)) {
		return
	}
	d.warnings.At(d.Place(field), problem.BadModel, field,
		fmt.Sprintf("the teacher %s has the weights of `model.path`: the two agree on every token, so that the loss is 0 and nothing is learned",
			d.Config.GetAlgorithm().GetDistillation().GetTeacher()),
		"name another model as the teacher; it is of use only to a run that starts elsewhere, with `rollout run --from`")
}

// weights are the digests of a model's tensors, whatever its files are called.
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

// request asks a teacher's endpoint about the first prompt; nil where there is none, or model or data can't be used anyway.
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

// answer says why a teacher's endpoint could not teach.
func (d *teacherCheck) answer(answer *probe.Answer, err error) {
	switch {
	case err != nil:
		d.Problems.Add(probeProblem(err))
	case answer != nil && answer.Teacher != nil && answer.Teacher.Error != nil:
		d.Problems.Add(d.pythonProblem(answer.Teacher.Error, "algorithm.distillation.endpoint"))
	}
}
