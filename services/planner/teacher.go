package planner

import (
	"fmt"
	"slices"
	"strings"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// teacherCheck reads the teacher of a distillation, or calls its endpoint.
type teacherCheck struct {
	config   *configv1.RunConfig
	findings findings
	models   models
	python   pythonErrors

	model *input.Model    // a teacher in a folder; nil without a usable one
	files []*planv1.Input // of it
}

// read reads the folder of a teacher. It must have the tokenizer of the trained model, which is nil
// if it is not usable.
func (d *teacherCheck) read(trained *input.Model) {
	const field = "algorithm.distillation.teacher"
	path := d.config.GetAlgorithm().GetDistillation().GetTeacher()
	if path == "" || !d.models.exists(field, path, true) {
		return
	}
	before := d.findings.problems.Len()
	folder := d.models.resolve(path)
	teacher := input.ReadModel(folder, path, field, d.findings.problems)
	if teacher.Scores() {
		d.findings.report(field, problem.BadModel, fmt.Sprintf("%s is a reward model (%s), which can't generate completions", path, teacher.Architecture),
			"use a language model as the teacher; a reward model belongs in `[reward.model]`")
		return
	}
	if trained != nil && teacher.Embedded > 0 && trained.Embedded > 0 && teacher.Embedded != trained.Embedded {
		d.findings.report(field, problem.BadModel, fmt.Sprintf("the vocabulary of the teacher has %d tokens, that of the model %d", teacher.Embedded, trained.Embedded),
			"use a teacher with the same tokenizer")
	} else if trained != nil {
		if difference := trained.OtherTokens(teacher); difference != "" {
			d.findings.report(field, problem.BadModel, "the teacher has a different vocabulary: "+difference,
				"use a teacher with the same tokenizer")
		}
	}
	if d.findings.problems.Len() > before {
		return
	}
	d.model, d.files = teacher, d.models.pin(planv1.InputRole_INPUT_ROLE_MODEL, teacher, folder, path)
}

// compare warns if the teacher has the weights of the trained model. Files must have their digests.
func (d *teacherCheck) compare(trained []*planv1.Input) {
	const field = "algorithm.distillation.teacher"
	if own := weights(trained); len(own) == 0 || !slices.Equal(own, weights(d.files)) {
		return
	}
	d.findings.warn(field, problem.BadModel,
		fmt.Sprintf("the teacher %s has the same weights as `model.path`, so the loss is 0 and nothing is learned",
			d.config.GetAlgorithm().GetDistillation().GetTeacher()),
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
func (d *teacherCheck) request(trained *input.Model, data *input.Dataset) *probe.Teacher {
	endpoint := d.config.GetAlgorithm().GetDistillation().GetEndpoint()
	const table = "algorithm.distillation.endpoint"
	if endpoint == nil || trained == nil || data == nil || len(data.First) == 0 || !d.findings.Readable(table) || !d.findings.problems.Empty() {
		return nil
	}
	return &probe.Teacher{
		Model: d.models.resolve(d.config.GetModel().GetPath()), BaseURL: endpoint.GetBaseUrl(), Name: endpoint.GetModel(),
		APIKey: endpoint.GetApiKey(), Protocol: endpoint.GetProtocol(), TimeoutSeconds: endpoint.GetTimeoutSeconds(),
		Prompt: data.First[0].Prompt,
	}
}

// answer reports why the endpoint of a teacher failed.
func (d *teacherCheck) answer(answer *probe.Answer, err error) {
	switch {
	case err != nil:
		d.findings.problems.Add(probeProblem(err))
	case answer != nil && answer.Teacher != nil && answer.Teacher.Error != nil:
		d.findings.problems.Add(d.python.pythonProblem(answer.Teacher.Error, "algorithm.distillation.endpoint"))
	}
}
