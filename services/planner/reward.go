package planner

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/engine"
	"github.com/rollout-rl/rollout/libs/reward"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/document"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/memory"
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

// rewardCheck calls the rewards of the configuration, or the own reward of a suite, once.
type rewardCheck struct {
	config   *configv1.RunConfig
	table    string // "reward", or that of a suite
	findings findings
	files    *files

	scorers []memory.Scorer // of the usable reward models
}

// parts are the rewards, with their keys.
func (d *rewardCheck) parts() []reward.Part {
	parts := reward.Parts(d.config)
	for i := range parts {
		parts[i].Field = d.table + strings.TrimPrefix(parts[i].Field, "reward")
	}
	return parts
}

// read checks that the files of rewards exist, and reads their models. trained is the model of the
// run, nil if it is not usable.
func (d *rewardCheck) read(trained *input.Model) {
	for _, part := range d.parts() {
		if part.Model != nil {
			d.readScoringModel(part, trained)
		}
		if field := part.Field + ".plugin"; part.Plugin != "" && d.findings.Readable(field) {
			if !isInstalled(part.Plugin) && d.files.exists(field, pluginFile(part.Plugin), false) && part.Sandbox && isManifest(part.Plugin) {
				d.findings.report(field, problem.Conflict, fmt.Sprintf("the sidecar %s can't run in the sandbox", part.Plugin),
					"write `sandbox = false` for it, or start the sidecar in a container and name its `address` in the manifest")
			}
		}
	}
}

// readScoringModel reads the folder of a reward model. It must have the tokenizer of the trained
// model.
func (d *rewardCheck) readScoringModel(part reward.Part, trained *input.Model) {
	field, path := part.Field+".model.path", part.Model.GetPath()
	if path == "" || !d.findings.Readable(field) || !d.files.exists(field, path, true) {
		return
	}
	before := d.findings.problems.Len()
	folder := d.files.resolve(path)
	scorer := input.ReadModel(folder, path, field, d.findings.problems)
	positions, why := scorer.Context(engine.Capabilities{}) // a scoring worker has none of them
	const fix = "use the weights of a run with [algorithm.reward_model], or a sequence classifier with one label"
	switch {
	case d.findings.problems.Len() > before:
		return
	case scorer.Architecture != "" && !scorer.Scores():
		d.findings.report(field, problem.BadModel, fmt.Sprintf("%s is not a reward model but a %s", path, scorer.Architecture), fix)
	case len(scorer.Tensors) > 0 && !slices.Contains(scorer.Tensors, "score.weight"):
		d.findings.report(field, problem.BadModel, path+" is not a reward model: it has no tensor `score.weight`, the score head", fix)
	case trained != nil && trained.OtherTokens(scorer) != "":
		d.findings.report(field, problem.BadModel, "the reward model has a different vocabulary: "+trained.OtherTokens(scorer),
			"use one with the same tokenizer")
	case positions > 0 && int64(d.config.GetEngine().GetMaxModelLen()) > positions:
		d.findings.report(field, problem.OutOfRange, fmt.Sprintf("the reward model is too short: %s, but `engine.max_model_len` is %d", why, d.config.GetEngine().GetMaxModelLen()),
			fmt.Sprintf("write `max_model_len = %d` in [engine]", positions))
	}
	if d.findings.problems.Len() > before {
		return
	}
	d.files.pin(planv1.InputRole_INPUT_ROLE_REWARD, scorer, folder, path)
	d.scorers = append(d.scorers, memory.Scorer{
		Field: part.Field, Parameters: scorer.Elements(func(string) bool { return true }), Dtype: part.Model.GetDtype(),
	})
}

// calls has one call of each reward on the first rows: one sample with the reference answer, one
// with an empty completion. Held-out rows may have other keys, so the first of them is scored too.
func (d *rewardCheck) calls(rows scoredRows, trained *input.Model) []*dryCall {
	if rows.first == nil || len(rows.first.First) == 0 {
		return nil
	}
	var calls []*dryCall
	for _, part := range d.parts() {
		if !d.findings.Readable(part.Field) || part.Model != nil {
			continue
		}
		request := &probe.Reward{Expression: part.Expression, Plugin: part.Plugin, Evaluates: d.table != "reward", BaseDir: d.files.baseDir, TimeoutSeconds: part.Timeout}
		field := part.Field + ".expression"
		if part.Expression == "" {
			field = part.Field + ".plugin"
			if part.Plugin == "" || !isInstalled(part.Plugin) && !isFile(d.files.resolve(pluginFile(part.Plugin))) || part.Sandbox && isManifest(part.Plugin) {
				continue // reported already
			}
		} else {
			for _, data := range rows.all {
				request.Files = append(request.Files, probe.Rows{Path: data.File, Name: data.Path})
			}
		}
		for i, row := range rows.first.First {
			sample := probe.Sample{Prompt: row.Prompt, Row: row.JSON}
			if i == 0 {
				sample.Completion = rows.first.Reference(row)
			}
			request.Samples = append(request.Samples, sample)
		}
		if rows.eval != nil && rows.eval != rows.first && len(rows.eval.First) > 0 {
			row := rows.eval.First[0]
			request.HeldOut = []probe.Sample{{Prompt: row.Prompt, Completion: rows.eval.Reference(row), Row: row.JSON}}
		}
		if part.Sandbox {
			limits := d.config.GetReward().GetLimits()
			request.Sandbox = &probe.Limits{
				MemoryBytes: limits.GetMemoryBytes(), Pids: limits.GetPids(), CPUs: limits.GetCpus(), OutputBytes: limits.GetOutputBytes(),
				DiskBytes: limits.GetDiskBytes(),
			}
		}
		if trained != nil {
			request.Model = d.files.resolve(d.config.GetModel().GetPath())
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
		d.findings.problems.Add(d.files.pythonProblem(python, call.field))
		return
	case call.err != nil && pythonWorks: // then the reward ended the process
		d.findings.report(call.field, "REWARD_RAISED", fmt.Sprintf("`%s` ended its process: %v", call.part.Plugin+call.part.Expression, call.err), "call it in Python to see the reason")
		return
	case call.err != nil || call.answer.Reward == nil:
		return // reported already
	}
	if e := call.answer.Reward.Error; e != nil {
		if call.part.Expression != "" {
			d.expressionProblem(e, call.field)
			return
		}
		if key := map[string]string{"LIMIT_NOT_ENFORCEABLE": "limits.cpus", "REWARD_SANDBOX": "sandbox"}[e.Reason]; key != "" {
			d.findings.report(d.table+"."+key, e.Reason, e.Message, e.Fix)
			return
		}
		d.findings.problems.Add(d.files.pythonProblem(e, call.field))
		return
	}
	if call.answer.Reward.Parts && !algorithm.Traits(d.config).GetTokenRewards() {
		d.findings.report(call.field, problem.Conflict, fmt.Sprintf("`%s` rewards parts of a completion, which %s does not support", call.part.Plugin, algorithm.Title(d.config)),
			"use [algorithm.ppo], [algorithm.reinforce_pp], or [algorithm.grpo], or return one number per sample")
		return
	}
	d.files.install(call.answer.Reward.Plugins)
	for _, file := range call.answer.Reward.Files {
		d.files.addOnce(&planv1.Input{
			Role: planv1.InputRole_INPUT_ROLE_REWARD, Path: input.Relative(d.files.baseDir, file, call.part.Plugin),
		})
	}
}

// constant warns of a reward that scores the reference answer and an empty completion alike: equal
// rewards have a gradient of 0. It reports nothing if a part was not called, or if there is no
// reference answer.
func (d *rewardCheck) constant(calls []*dryCall) {
	if len(calls) == 0 || len(calls) < len(d.parts()) || !algorithm.Traits(d.config).GetNeedsReward() {
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
	d.findings.warn(calls[0].field, problem.ConstantReward,
		fmt.Sprintf("%s: for the reference answer %q of the first row, and for empty completions", all, samples[0].Completion),
		"check that a right answer gets more than a wrong one: with equal rewards a group has no gradient")
}

// expressionProblem places an error at its column in the expression.
func (d *rewardCheck) expressionProblem(e *probe.Error, field string) {
	d.findings.problems.At(inText(d.findings.Place(field), e.Line, e.Column), e.Reason, field, e.Message, e.Fix)
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
