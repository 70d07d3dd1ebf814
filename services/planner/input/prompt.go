package input

import (
	"encoding/json"
	"fmt"
)

func (d *Dataset) prompt(line []byte, fields map[string]json.RawMessage) (string, bool) {
	raw, ok := fields[d.PromptField]
	if !ok {
		d.lacks(line, fields, d.PromptField, "data.prompt_field", "prompt_field")
		return "", false
	}
	var text string
	if json.Unmarshal(raw, &text) == nil && raw[0] == '"' {
		if text == "" {
			d.badField("empty prompt", line, d.PromptField, fmt.Sprintf("`%s` is empty", d.PromptField), "remove the row, or write a prompt")
		}
		return text, text != ""
	}
	var messages []map[string]json.RawMessage
	if json.Unmarshal(raw, &messages) != nil || raw[0] != '[' {
		d.badField("prompt type", line, d.PromptField, fmt.Sprintf("`%s` is %s, not a string or a list of messages", d.PromptField, jsonKind(raw)),
			"write a string, or a list of {\"role\": ..., \"content\": ...}")
		return "", false
	}
	if !d.ChatTemplate {
		d.badField("messages", line, d.PromptField, fmt.Sprintf("`%s` is a list of messages, which needs a chat template", d.PromptField),
			"set `chat_template = true` in [model]")
		return "", false
	}
	return d.messages(line, messages)
}

func (d *Dataset) messages(line []byte, messages []map[string]json.RawMessage) (string, bool) {
	if len(messages) == 0 {
		d.badField("empty prompt", line, d.PromptField, fmt.Sprintf("`%s` is an empty list", d.PromptField), "remove the row, or write a message")
		return "", false
	}
	last := map[string]string{}
	for i, message := range messages {
		for _, key := range []string{"role", "content"} {
			var text string
			if raw, ok := message[key]; !ok || json.Unmarshal(raw, &text) != nil || raw[0] != '"' {
				d.badField("message", line, d.PromptField, fmt.Sprintf("message %d of `%s` has no string `%s`", i, d.PromptField, key),
					"write {\"role\": \"user\", \"content\": \"...\"}")
				return "", false
			}
			last[key] = text
		}
	}
	if d.Asked && last["role"] == assistant {
		d.badField("answered", line, d.PromptField, fmt.Sprintf("`%s` ends with a message of the assistant, but the policy has to answer it", d.PromptField),
			"end it with a message of the user, and put the reference answer into another field")
		return "", false
	}
	return last["content"], true
}

// conversation reports whether the prompt is a list of messages that ends with one of the
// assistant, so that no answer is needed.
func (d *Dataset) conversation(fields map[string]json.RawMessage) bool {
	var messages []struct{ Role string }
	return json.Unmarshal(fields[d.PromptField], &messages) == nil && len(messages) > 0 && messages[len(messages)-1].Role == assistant
}

const assistant = "assistant"
