package planner

import (
	"fmt"
	"strings"

	"github.com/rollout-rl/rollout/libs/algorithm"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// promptCheck compares the token count of every row with the context of the model.
type promptCheck struct {
	config   *configv1.RunConfig
	findings findings
	python   pythonErrors
	rows     rowEditor
}

// rowEditor leaves out or cuts the rows that are too long.
type rowEditor interface {
	drop(data *input.Dataset, rows []uint64) error
	truncated(data *input.Dataset, rows uint64)
	maxTokens(data *input.Dataset) uint32
}

// request asks for the length of every prompt; nil without datasets or a usable model, and if an
// environment reads the rows. folder is that of the model.
func (d *promptCheck) request(datasets []*input.Dataset, model *input.Model, folder string) *probe.Tokenizer {
	if model == nil || len(datasets) == 0 || d.config.GetAlgorithm() == nil || datasets[0].PromptField == "" {
		return nil
	}
	cfg := d.config
	request := &probe.Tokenizer{Model: folder, ChatTemplate: cfg.GetModel().GetChatTemplate()}
	for _, data := range datasets {
		request.Files = append(request.Files, probe.File{
			Path: data.File, PromptField: data.PromptField, AnswerFields: data.Completions(),
			Limit: d.limit(data), Overlong: cfg.GetData().GetOverlong(),
		})
	}
	return request
}

// answer reports the problems of rows, and leaves out those that `data.overlong` drops.
func (d *promptCheck) answer(answer *probe.Answer, datasets []*input.Dataset, context modelContext) error {
	if answer.Tokenizer == nil {
		return nil
	}
	if e := answer.Tokenizer.Error; e != nil {
		d.findings.problems.Add(d.python.pythonProblem(e, "model.path"))
		return nil
	}
	for i, data := range datasets {
		lengths := answer.Tokenizer.Files[i]
		if err := d.overlong(data, lengths, context); err != nil {
			return err
		}
		if len(lengths.Strange) > 0 {
			d.unknownText(data, lengths)
		}
		if rows := lengths.Empty; len(rows) > 0 {
			message := "the prompt has no tokens"
			if len(rows) > 1 {
				message += fmt.Sprintf("; %d other rows have none either", len(rows)-1)
			}
			d.findings.problems.Add(&planv1.Problem{
				Reason: problem.BadRow, File: data.Path, Line: uint32(rows[0] + 1), Column: 1,
				Message: message, Fix: "remove the row, or write a prompt with text of the vocabulary",
			})
		}
	}
	return nil
}

// overlong does what `data.overlong` asks for with the rows that exceed the limit.
func (d *promptCheck) overlong(data *input.Dataset, lengths probe.Lengths, context modelContext) error {
	if len(lengths.Examples) == 0 {
		return nil
	}
	drop := uint64(len(lengths.Drop))
	if d.config.GetData().GetOverlong() == "error" || drop == data.Rows {
		d.tooLong(data, lengths, context)
		return nil
	}
	d.rows.truncated(data, lengths.Cut)
	if drop == 0 {
		return nil
	}
	return d.rows.drop(data, lengths.Drop)
}

// unknownText warns of rows with text outside of the vocabulary. The model gets the unknown token
// instead, and learns to generate it if the text is a training target.
func (d *promptCheck) unknownText(data *input.Dataset, lengths probe.Lengths) {
	first := lengths.Strange[0]
	message, fix := "the vocabulary does not contain %q: the model gets its unknown token instead", "write the prompt with characters of the vocabulary, or remove the row"
	if first.Field != data.PromptField {
		message = "the vocabulary does not contain %q in `" + first.Field + "`: the model learns to generate its unknown token"
		fix = "write `" + first.Field + "` with characters of the vocabulary, or remove the row"
	}
	message = fmt.Sprintf(message, first.Text)
	if lengths.Unknown > 1 {
		message += fmt.Sprintf("; %d rows have text like this", lengths.Unknown)
	}
	d.findings.warnings.Add(&planv1.Problem{
		Reason: problem.BadRow, File: data.Path, Line: uint32(first.Row + 1), Column: 1, Message: message, Fix: fix,
		Excerpt: input.Lines(data.File, []uint64{first.Row + 1})[first.Row+1],
	})
}

// longShown is the number of rows that a problem lists; others are counted.
const longShown = 5

// tooLong reports all rows of a file that exceed the limit in one problem, at the first of them.
func (d *promptCheck) tooLong(data *input.Dataset, lengths probe.Lengths, context modelContext) {
	engine := d.config.GetEngine()
	one, many, room := "the prompt has %d tokens", "%d prompts are too long", fmt.Sprintf("%d tokens of max_model_len minus %d of max_tokens leave %d",
		engine.GetMaxModelLen(), d.rows.maxTokens(data), d.limit(data))
	if len(data.Completions()) > 0 {
		one, many = "prompt, answer and end have %d tokens", "%d rows (prompt, answer and end) are too long"
	}
	if !d.sampled(data) {
		room = fmt.Sprintf("max_model_len leaves %d", d.limit(data))
	}
	first := lengths.Examples[0]
	message, fix := fmt.Sprintf(one+"; %s", first.Tokens, room), d.fixLength(data, context)
	if lengths.Over > 1 {
		var named []string
		for _, example := range lengths.Examples[:min(len(lengths.Examples), longShown)] {
			named = append(named, fmt.Sprintf("line %d has %d", example.Row+1, example.Tokens))
		}
		message = fmt.Sprintf(many+"; %s: %s", lengths.Over, room, strings.Join(named, ", "))
		if more := lengths.Over - int64(len(named)); more > 0 {
			message += fmt.Sprintf(", and %d more; the longest has %d", more, lengths.Longest)
		}
		fix = strings.Replace(fix, "the row", "the rows", 1)
	}
	d.findings.problems.Add(&planv1.Problem{
		Reason: problem.ContextTooLong, File: data.Path, Line: uint32(first.Row + 1), Column: 1, Field: "engine.max_model_len",
		Message: message, Fix: fix, Excerpt: input.Lines(data.File, []uint64{first.Row + 1})[first.Row+1],
	})
}

// fixLength suggests how to fit the limit. The positions of the model can't be raised.
func (d *promptCheck) fixLength(data *input.Dataset, context modelContext) string {
	fix := "shorten or remove the row, write `overlong = \"drop\"` or `\"truncate\"` in [data]"
	if d.config.GetData().GetOverlong() != "error" { // no row is left
		fix = "use other data"
	}
	if d.sampled(data) {
		fix += ", lower `max_tokens` in [sampling]"
	}
	if context.positions == 0 || int64(d.config.GetEngine().GetMaxModelLen()) < context.positions {
		fix += ", raise `max_model_len` in [engine]"
	}
	if context.positions > 0 {
		fix += " (" + context.why + ")"
	}
	return fix
}

// sampled reports whether the limit includes sampled completions.
func (d *promptCheck) sampled(data *input.Dataset) bool {
	return len(data.Completions()) == 0 && algorithm.Samples(d.config)
}

func (d *promptCheck) limit(data *input.Dataset) int64 {
	limit := int64(d.config.GetEngine().GetMaxModelLen())
	if d.sampled(data) {
		limit -= int64(d.rows.maxTokens(data))
	}
	return limit
}
