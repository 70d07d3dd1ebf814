package planner

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// tokenizerRequest asks for the length of every prompt; nil where model or data can't be used anyway.
func (d *draft) tokenizerRequest() *probe.Tokenizer {
	if d.model == nil || d.train == nil && d.eval == nil || d.Config.GetAlgorithm() == nil {
		return nil
	}
	cfg := d.Config
	request := &probe.Tokenizer{Model: input.Resolve(d.baseDir, cfg.GetModel().GetPath()), ChatTemplate: cfg.GetModel().GetChatTemplate()}
	for _, data := range d.datasets() {
		limit := int64(cfg.GetEngine().GetMaxModelLen())
		if data.AnswerField == "" {
			limit -= int64(cfg.GetSampling().GetMaxTokens())
		}
		request.Files = append(request.Files, probe.File{
			Path: input.Resolve(d.baseDir, data.Path), PromptField: data.PromptField, AnswerField: data.AnswerField, Limit: limit,
		})
	}
	return request
}

func (d *draft) datasets() []*input.Dataset {
	var out []*input.Dataset
	for _, data := range []*input.Dataset{d.train, d.eval} {
		if data != nil {
			out = append(out, data)
		}
	}
	return out
}

func (d *draft) tokenizerAnswer(answer *probe.Answer) {
	if answer.Tokenizer == nil {
		return
	}
	if e := answer.Tokenizer.Error; e != nil {
		d.Problems.Add(d.pythonProblem(e, "model.path"))
		return
	}
	cfg := d.Config
	for i, data := range d.datasets() {
		lengths := answer.Tokenizer.Files[i]
		what, room := "the prompt has %d tokens", fmt.Sprintf("%d of max_model_len less %d of max_tokens leave",
			cfg.GetEngine().GetMaxModelLen(), cfg.GetSampling().GetMaxTokens())
		if data.AnswerField != "" {
			what, room = "prompt, answer and end have %d tokens", "max_model_len leaves"
		}
		limit := d.tokenizerLimit(data)
		var wanted []uint64
		for _, example := range lengths.Examples {
			wanted = append(wanted, example.Row+1)
		}
		excerpts := input.Lines(input.Resolve(d.baseDir, data.Path), wanted)
		for n, example := range lengths.Examples {
			message := fmt.Sprintf(what+"; %s %d", example.Tokens, room, limit)
			if more := lengths.Over - int64(len(lengths.Examples)); n == len(lengths.Examples)-1 && more > 0 {
				message += fmt.Sprintf(" (and %d more rows are too long; the longest has %d tokens)", more, lengths.Longest)
			}
			d.Problems.Add(&planv1.Problem{
				Reason: problem.ContextTooLong, File: data.Path, Line: uint32(example.Row + 1), Column: 1, Field: "engine.max_model_len",
				Message: message, Mend: d.mendLength(data), Excerpt: excerpts[example.Row+1],
			})
		}
		for _, row := range lengths.Empty {
			d.Problems.Add(&planv1.Problem{
				Reason: problem.BadRow, File: data.Path, Line: uint32(row + 1), Column: 1,
				Message: "the tokenizer makes no token of the prompt", Mend: "remove the row, or write a prompt that its vocabulary has",
			})
		}
	}
}

// mendLength says what makes room: the model's positions can't be raised.
func (d *draft) mendLength(data *input.Dataset) string {
	mend := "shorten or remove the row"
	if data.AnswerField == "" {
		mend += ", lower `max_tokens` in [sampling]"
	}
	if d.model.Context == 0 || int64(d.Config.GetEngine().GetMaxModelLen()) < d.model.Context {
		mend += ", raise `max_model_len` in [engine]"
	}
	if d.model.Context > 0 {
		mend += fmt.Sprintf(" (the model has %d positions)", d.model.Context)
	}
	return mend
}

func (d *draft) tokenizerLimit(data *input.Dataset) int64 {
	limit := int64(d.Config.GetEngine().GetMaxModelLen())
	if data.AnswerField == "" {
		limit -= int64(d.Config.GetSampling().GetMaxTokens())
	}
	return limit
}

// rewardRequest asks for one call on the first rows: one sample that answers as the row does, one that says nothing, as a
// policy may.
func (d *draft) rewardRequest() *probe.Reward {
	reward := d.Config.GetReward()
	if reward.GetPlugin() == "" || !d.Readable("reward") || d.first == nil || len(d.first.First) == 0 {
		return nil
	}
	file, _, _ := strings.Cut(reward.GetPlugin(), ".py:")
	if info, err := os.Stat(input.Resolve(d.baseDir, file+".py")); err != nil || info.IsDir() {
		return nil // said already
	}
	request := &probe.Reward{Plugin: reward.GetPlugin(), BaseDir: d.baseDir, TimeoutSeconds: reward.GetTimeoutSeconds()}
	for i, row := range d.first.First {
		sample := probe.Sample{Prompt: row.Prompt, Row: row.JSON}
		if i == 0 {
			sample.Completion = d.first.Reference(row)
		}
		request.Samples = append(request.Samples, sample)
	}
	return request
}

func (d *draft) rewardAnswer(answer *probe.Answer, err error, pythonWorks bool) {
	var python *probe.Error
	switch {
	case errors.As(err, &python):
		d.Problems.Add(d.pythonProblem(python, "reward.plugin"))
		return
	case err != nil && pythonWorks: // then it was the reward that ended the process
		d.Problems.At(d.Place("reward.plugin"), "REWARD_RAISED", "reward.plugin",
			fmt.Sprintf("`%s` ended its whole process: %v", d.Config.GetReward().GetPlugin(), err), "call it alone in Python to see why")
		return
	case err != nil:
		return // said already
	}
	if answer.Reward == nil {
		return
	}
	if e := answer.Reward.Error; e != nil {
		d.Problems.Add(d.pythonProblem(e, "reward.plugin"))
		return
	}
	for _, file := range answer.Reward.Files {
		d.inputs = append(d.inputs, &planv1.Input{
			Role: planv1.InputRole_INPUT_ROLE_REWARD, Path: input.Relative(d.baseDir, file, d.Config.GetReward().GetPlugin()),
		})
	}
}

// packages pins the versions that the workers would run with, and says which are missing.
func (d *draft) packages(answer *probe.Answer) map[string]string {
	versions := map[string]string{"python": answer.Python}
	for _, name := range probe.Packages {
		if version := answer.Packages[name]; version != nil {
			versions[name] = *version
			continue
		}
		if name == "rollout-rl" {
			continue // run from a checkout
		}
		d.Problems.Add(&planv1.Problem{
			Reason: problem.PackageMissing, Message: fmt.Sprintf("the workers' Python has no package %s", name),
			Mend: fmt.Sprintf("install it: %s -m pip install %s", d.server.prober.Python, name),
		})
	}
	return versions
}

// pythonProblem places an error of Python's at its line, or at the field that named the plugin.
func (d *draft) pythonProblem(e *probe.Error, field string) *planv1.Problem {
	p := &planv1.Problem{Reason: e.Reason, Field: field, Message: e.Message, Mend: e.Mend}
	if e.File == "" || e.Line == 0 && e.File != "" && filepath.Ext(e.File) == ".py" {
		var list problem.List
		list.At(d.Place(field), e.Reason, field, e.Message, e.Mend)
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
		Reason: problem.Probe, Message: "the Python probe ended early: " + err.Error(),
		Mend: "check the Python environment of the workers: `python -m rollout.probe` must run in it",
	}
}
