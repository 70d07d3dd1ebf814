package planner

import (
	"fmt"
	"path/filepath"

	"github.com/rollout-rl/rollout/libs/algorithm"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// dataCheck reads the datasets.
type dataCheck struct {
	*draft

	train, eval *input.Dataset // nil without a usable dataset
	first       *input.Dataset // the rows that the reward scores in its dry call, even if other rows have problems
}

func (d *dataCheck) read() error {
	data := d.Config.GetData()
	var err error
	if d.train, err = d.dataset("data.train", data.GetTrain(), planv1.InputRole_INPUT_ROLE_TRAIN_DATA); err != nil {
		return err
	}
	if d.eval, err = d.dataset("data.eval", data.GetEval(), planv1.InputRole_INPUT_ROLE_EVAL_DATA); err != nil {
		return err
	}
	d.heldOut()
	return nil
}

// dataset reads one file of rows; nil if it is not set, does not exist, or has problems.
func (d *dataCheck) dataset(field, path string, role planv1.InputRole) (*input.Dataset, error) {
	if path == "" || !d.exists(field, path, false) {
		return nil, nil
	}
	before := d.Problems.Len()
	data := &input.Dataset{
		Path: path, PromptField: d.Config.GetData().GetPromptField(),
		ReferenceField: d.Config.GetData().GetAnswerField(), ChatTemplate: d.Config.GetModel().GetChatTemplate(),
	}
	if d.taught(role) {
		data.AnswerField, data.Preference = d.answer(), d.preference()
	}
	data.Asked = role == planv1.InputRole_INPUT_ROLE_EVAL_DATA && algorithm.FromData(d.Config) && !d.taught(role)
	if err := data.Read(d.resolve(path), &d.Problems); err != nil {
		return nil, err
	}
	if role == d.scored() {
		d.first = data
	}
	if d.Problems.Len() > before {
		return nil, nil
	}
	d.labels(data)
	d.inputs = append(d.inputs, &planv1.Input{
		Role: role, Path: filepath.ToSlash(filepath.Clean(path)), Digest: data.Digest, Bytes: data.Bytes, Rows: data.Rows,
	})
	return data, nil
}

// heldOut warns of held-out rows that are equal to the training rows.
func (d *dataCheck) heldOut() {
	if d.train == nil || d.eval == nil || d.train.Digest != d.eval.Digest {
		return
	}
	const field = "data.eval"
	d.warnings.At(d.Place(field), problem.BadRow, field,
		fmt.Sprintf("%s has the same rows as `data.train`: evaluations would measure memorization", d.Config.GetData().GetEval()),
		"move some rows from `data.train` to another file and use it here")
}

// labels warns if all labels are equal.
func (d *dataCheck) labels(data *input.Dataset) {
	if data.Preference.Label == "" || data.Desirable > 0 && data.Desirable < data.Rows {
		return
	}
	has, lacks := "desirable (true)", "undesirable (false)"
	if data.Desirable == 0 {
		has, lacks = lacks, has
	}
	d.warnings.Add(&planv1.Problem{
		Reason: problem.BadRow, File: data.Path, Line: 1, Column: 1,
		Message: fmt.Sprintf("every completion is %s and none is %s, but KTO needs both", has, lacks),
		Fix:     fmt.Sprintf("add rows with the other value of `%s`, or use [algorithm.sft] if all are desirable", data.Preference.Label),
	})
}

// scored is the role of the rows whose completions the reward scores: the held-out ones if the
// algorithm trains on rows.
func (d *dataCheck) scored() planv1.InputRole {
	if algorithm.FromData(d.Config) && d.Config.GetData().GetEval() != "" {
		return planv1.InputRole_INPUT_ROLE_EVAL_DATA
	}
	return planv1.InputRole_INPUT_ROLE_TRAIN_DATA
}

// taught reports whether rows must contain training targets: training rows, and held-out rows whose
// loss is computed.
func (d *dataCheck) taught(role planv1.InputRole) bool {
	return role == planv1.InputRole_INPUT_ROLE_TRAIN_DATA || algorithm.TeachesHeldOut(d.Config)
}

// answer is the field that the algorithm trains on; "" without one.
func (d *dataCheck) answer() string {
	if d.Config.GetAlgorithm().GetSft() != nil {
		return d.Config.GetData().GetAnswerField()
	}
	return ""
}

// preference has the fields that the algorithm needs in addition to the prompt.
func (d *dataCheck) preference() input.Preference {
	data, p := d.Config.GetData(), input.Preference{Algorithm: algorithm.Name(d.Config)}
	if algorithm.Pairs(d.Config) {
		p.Chosen, p.Rejected = data.GetChosenField(), data.GetRejectedField()
		p.Others, p.OthersFix = [2]string{data.GetCompletionField(), data.GetLabelField()}, "use [algorithm.kto], which trains on labels"
	}
	if d.Config.GetAlgorithm().GetRewardModel() != nil {
		p.Margin = data.GetMarginField()
	}
	if kto := d.Config.GetAlgorithm().GetKto(); kto != nil && !kto.GetPaired() {
		p.Completion, p.Label = data.GetCompletionField(), data.GetLabelField()
		p.Others, p.OthersFix = [2]string{data.GetChosenField(), data.GetRejectedField()}, "write `paired = true` in [algorithm.kto]"
	}
	return p
}

// rows are those of one pass over the training data; 0 without usable training data.
func (d *dataCheck) rows() uint64 {
	if d.train == nil {
		return 0
	}
	return d.train.Rows
}

// all are the usable datasets.
func (d *dataCheck) all() []*input.Dataset {
	var out []*input.Dataset
	for _, data := range []*input.Dataset{d.train, d.eval} {
		if data != nil {
			out = append(out, data)
		}
	}
	return out
}

// scoredData are the datasets whose rows a reward scores.
func (d *dataCheck) scoredData() []*input.Dataset {
	var out []*input.Dataset
	for _, data := range d.all() {
		if data != d.train || !algorithm.FromData(d.Config) {
			out = append(out, data)
		}
	}
	return out
}
