package input

import (
	"encoding/json"
	"fmt"
)

func (c *rowCheck) answer(line []byte, fields map[string]json.RawMessage) (string, bool) {
	field := c.data.AnswerField
	if field == "" {
		return "", true
	}
	raw, ok := fields[field]
	if !ok && c.conversation(fields) {
		return "", true
	}
	if prompt := fields[c.data.PromptField]; !ok && len(prompt) > 0 && prompt[0] == '[' {
		c.badField("unanswered", line, c.data.PromptField, fmt.Sprintf("`%s` does not end with a message of the assistant, and the row has no `%s`", c.data.PromptField, field),
			fmt.Sprintf("add the assistant's message, which the run trains on, or put it into `%s`", field))
		return "", false
	}
	if !ok {
		c.lacks(line, fields, field, "data.answer_field", "answer_field")
		return "", false
	}
	return c.trained(line, raw, field, "answer", "sft")
}

// trained returns the text of a field that an algorithm trains on. noun is what messages call it.
func (r *reporter) trained(line []byte, raw json.RawMessage, field, noun, algorithm string) (string, bool) {
	var text string
	if json.Unmarshal(raw, &text) == nil && raw[0] == '"' && text != "" {
		return text, true
	}
	what := jsonKind(raw) + ", not a string"
	if raw[0] == '"' {
		what = empty
	}
	r.badField(field+" type", line, field, fmt.Sprintf("`%s` is %s, but [algorithm.%s] trains on it", field, what, algorithm), fixText(noun, what))
	return "", false
}

// Completions are the names of the fields that are trained on.
func (d *Dataset) Completions() []string {
	if d.AnswerField != "" {
		return []string{d.AnswerField}
	}
	return d.Preference.completions()
}

// fixText suggests how to fix a field that is trained on.
func fixText(noun, what string) string {
	if what == empty {
		return "remove the row, or write the " + noun + ""
	}
	return "write the " + noun + " as a string"
}

const empty = "empty"
