package planner

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/engine"
	"github.com/rollout-rl/rollout/libs/reward"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/document"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// dryCall is a reward with the request that calls it once, and the answer.
type dryCall struct {
	part    reward.Part
	field   string // its key
	request *probe.Reward
	answer  *probe.Answer
	err     error
}

// rewardCheck calls the rewards of the configuration once.
type rewardCheck struct {
	*draft
	data  *dataCheck
	model *modelCheck
}

// read checks that the files of rewards are there, and reads their models.
func (d *rewardCheck) read() {
	for _, part := range reward.Parts(d.Config) {
		if part.Model != nil {
			d.readScoringModel(part)
		}
		if field := part.Field + ".plugin"; part.Plugin != "" && d.Readable(field) {
			file, _, _ := strings.Cut(part.Plugin, ".py:")
			d.exists(field, file+".py", false)
		}
	}
}

// readScoringModel reads the folder of a reward model. It must have the tokenizer of the trained
// model.
func (d *rewardCheck) readScoringModel(part reward.Part) {
	field, path := part.Field+".model.path", part.Model.GetPath()
	if path == "" || !d.Readable(field) || !d.exists(field, path, true) {
		return
	}
	before := d.Problems.Len()
	folder := d.resolve(path)
	scorer := input.ReadModel(folder, path, field, &d.Problems)
	positions, why := scorer.Context(engine.Capabilities{}) // a scoring worker has none of them
	const fix = "use the weights of a run with [algorithm.reward_model], or a sequence classifier with one label"
	switch {
	case d.Problems.Len() > before:
		return
	case scorer.Architecture != "" && !scorer.Scores():
		d.report(field, problem.BadModel, fmt.Sprintf("%s is not a reward model but a %s", path, scorer.Architecture), fix)
	case len(scorer.Tensors) > 0 && !slices.Contains(scorer.Tensors, "score.weight"):
		d.report(field, problem.BadModel, path+" is not a reward model: it has no tensor `score.weight`, the score head", fix)
	case d.model.model != nil && d.model.model.OtherTokens(scorer) != "":
		d.report(field, problem.BadModel, "the reward model has a different vocabulary: "+d.model.model.OtherTokens(scorer),
			"use one with the same tokenizer")
	case positions > 0 && int64(d.Config.GetEngine().GetMaxModelLen()) > positions:
		d.report(field, problem.OutOfRange, fmt.Sprintf("the reward model is too short: %s, but `engine.max_model_len` is %d", why, d.Config.GetEngine().GetMaxModelLen()),
			fmt.Sprintf("write `max_model_len = %d` in [engine]", positions))
	}
	if d.Problems.Len() > before {
		return
	}
	d.pin(planv1.InputRole_INPUT_ROLE_REWARD, scorer, folder, path)
}

// calls has one call of each reward on the first rows: one sample with the reference answer, one
// with an empty completion. Held-out rows may have other keys, so the first of them is scored too.
func (d *rewardCheck) calls() []*dryCall {
	if d.data.first == nil || len(d.data.first.First) == 0 {
		return nil
	}
	var calls []*dryCall
	for _, part := range reward.Parts(d.Config) {
		if !d.Readable(part.Field) || part.Model != nil {
			continue
		}
		request := &probe.Reward{Expression: part.Expression, Plugin: part.Plugin, BaseDir: d.baseDir, TimeoutSeconds: part.Timeout}
		field := part.Field + ".expression"
		if part.Expression == "" {
			field = part.Field + ".plugin"
			file, _, _ := strings.Cut(part.Plugin, ".py:")
			if info, err := os.Stat(d.resolve(file + ".py")); part.Plugin == "" || err != nil || info.IsDir() {
				continue // reported already
			}
		} else {
			for _, data := range d.data.scoredData() {
				request.Files = append(request.Files, probe.Rows{Path: data.File, Name: data.Path})
			}
		}
		for i, row := range d.data.first.First {
			sample := probe.Sample{Prompt: row.Prompt, Row: row.JSON}
			if i == 0 {
				sample.Completion = d.data.first.Reference(row)
			}
			request.Samples = append(request.Samples, sample)
		}
		if d.data.eval != nil && d.data.eval != d.data.first && len(d.data.eval.First) > 0 && d.Config.GetEval().GetEverySteps() > 0 {
			row := d.data.eval.First[0]
			request.HeldOut = []probe.Sample{{Prompt: row.Prompt, Completion: d.data.eval.Reference(row), Row: row.JSON}}
		}
		if d.model.model != nil {
			request.Model = d.resolve(d.Config.GetModel().GetPath())
		}
		calls = append(calls, &dryCall{part: part, field: field, request: request})
	}
	return calls
}

// answer reports what was wrong with a reward, or pins its files.
func (d *rewardCheck) answer(call *dryCall, pythonWorks bool) {
	var python *probe.Error
	switch {
	case errors.As(call.err, &python):
		d.Problems.Add(d.pythonProblem(python, call.field))
		return
	case call.err != nil && pythonWorks: // then the reward ended the process
		d.report(call.field, "REWARD_RAISED", fmt.Sprintf("`%s` ended its process: %v", call.part.Plugin+call.part.Expression, call.err), "call it in Python to see the reason")
		return
	case call.err != nil || call.answer.Reward == nil:
		return // reported already
	}
	if e := call.answer.Reward.Error; e != nil {
		if call.part.Expression != "" {
			d.expressionProblem(e, call.field)
			return
		}
		d.Problems.Add(d.pythonProblem(e, call.field))
		return
	}
	if call.answer.Reward.Parts && !algorithm.Traits(d.Config).GetTokenRewards() {
		d.report(call.field, problem.Conflict, fmt.Sprintf("`%s` rewards parts of a completion, which %s does not support", call.part.Plugin, algorithm.Title(d.Config)),
			"use [algorithm.ppo], [algorithm.reinforce_pp], or [algorithm.grpo], or return one number per sample")
		return
	}
	for _, file := range call.answer.Reward.Files {
		d.inputs = append(d.inputs, &planv1.Input{
			Role: planv1.InputRole_INPUT_ROLE_REWARD, Path: input.Relative(d.baseDir, file, call.part.Plugin),
		})
	}
}

// constant warns of a reward that does not tell the reference answer from an empty completion: with
// equal rewards there is no gradient. It says nothing if a part was not called, or if there is no
// reference answer.
func (d *rewardCheck) constant(calls []*dryCall) {
	if len(calls) == 0 || len(calls) < len(reward.Parts(d.Config)) || !algorithm.Traits(d.Config).GetNeedsReward() {
		return
	}
	samples := calls[0].request.Samples
	if len(samples) < 2 || samples[0].Completion == "" {
		return
	}
	for _, call := range calls {
		if call.err != nil || call.answer.Reward == nil || call.answer.Reward.Error != nil || call.answer.Reward.Parts {
			return
		}
		for _, score := range call.answer.Reward.Scores {
			if score.Reward != call.answer.Reward.Scores[0].Reward {
				return
			}
		}
	}
	all := "the reward is the same for all samples of the dry call"
	if len(calls) == 1 {
		all = fmt.Sprintf("the reward is %.4g for all %d samples of the dry call", calls[0].answer.Reward.Scores[0].Reward, len(samples))
	}
	d.warnings.At(d.Place(calls[0].field), problem.ConstantReward, calls[0].field,
		fmt.Sprintf("%s: for the reference answer %q of the first row, and for empty completions", all, samples[0].Completion),
		"check that a right answer gets more than a wrong one: with equal rewards a group has no gradient")
}

// expressionProblem places an error at its column in the expression.
func (d *rewardCheck) expressionProblem(e *probe.Error, field string) {
	d.Problems.At(inText(d.Place(field), e.Line, e.Column), e.Reason, field, e.Message, e.Fix)
}

// inText narrows the span of a string to a line and column of the string, from 1, in characters. A
// string with escapes keeps its span, as columns differ.
func inText(span document.Span, line, column uint32) document.Span {
	if !span.Valid() || line == 0 || column == 0 {
		return span
	}
	raw := string(span.Source.Data[span.Offset : span.Offset+span.Length])
	quotes := 1
	if strings.HasPrefix(raw, "\"\"\"") || strings.HasPrefix(raw, "'''") {
		quotes = 3
	}
	if len(raw) < 2*quotes || raw[0] == '"' && strings.Contains(raw, "\\") || raw[0] != '"' && raw[0] != '\'' {
		return span
	}
	at := quotes
	body := raw[quotes : len(raw)-quotes]
	if quotes == 3 && strings.HasPrefix(body, "\n") { // TOML drops it
		at, body = at+1, body[1:]
	}
	for ; line > 1; line-- {
		_, rest, ok := strings.Cut(body, "\n")
		if !ok {
			return span
		}
		at, body = at+len(body)-len(rest), rest
	}
	for ; column > 1 && body != ""; column-- {
		_, size := utf8.DecodeRuneInString(body)
		at, body = at+size, body[size:]
	}
	length := len(body) - len(strings.TrimLeft(body, wordBytes))
	return document.Span{Source: span.Source, Offset: span.Offset + at, Length: max(1, length)}
}

const wordBytes = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_"
