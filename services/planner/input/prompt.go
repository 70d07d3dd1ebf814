package input

import (
	"encoding/json"
	"fmt"
)

func (c *rowCheck) prompt(line []byte, fields map[string]json.RawMessage) (string, bool) {
	raw, ok := fields[c.data.PromptField]
	if !ok {
		c.lacks(line, fields, c.data.PromptField, "data.prompt_field", "prompt_field")
		return "", false
	}
	var text string
	if json.Unmarshal(raw, &text) == nil && raw[0] == '"' {
		if text == "" {
			c.badField("empty prompt", line, c.data.PromptField, fmt.Sprintf("`%s` is empty", c.data.PromptField), "remove the row, or write a prompt")
		}
		return text, text != ""
	}
	var messages []map[string]json.RawMessage
	if json.Unmarshal(raw, &messages) != nil || raw[0] != '[' {
		c.badField("prompt type", line, c.data.PromptField, fmt.Sprintf("`%s` is %s, not a string or a list of messages", c.data.PromptField, jsonKind(raw)),
			"write a string, or a list of {\"role\": ..., \"content\": ...}")
		return "", false
	}
	if !c.data.ChatTemplate {
		c.badField("messages", line, c.data.PromptField, fmt.Sprintf("`%s` is a list of messages, which needs a chat template", c.data.PromptField),
			"set `chat_template = true` in [model]")
		return "", false
	}
	return c.messages(line, messages)
}

func (c *rowCheck) messages(line []byte, messages []map[string]json.RawMessage) (string, bool) {
	if len(messages) == 0 {
		c.badField("empty prompt", line, c.data.PromptField, fmt.Sprintf("`%s` is an empty list", c.data.PromptField), "remove the row, or write a message")
		return "", false
	}
	last := map[string]string{}
	for i, message := range messages {
		for _, key := range []string{"role", "content"} {
			var text string
			if raw, ok := message[key]; !ok || json.Unmarshal(raw, &text) != nil || raw[0] != '"' {
				c.badField("message", line, c.data.PromptField, fmt.Sprintf("message %d of `%s` has no string `%s`", i, c.data.PromptField, key),
					"write {\"role\": \"user\", \"content\": \"...\"}")
				return "", false
			}
			last[key] = text
		}
	}
	if c.data.Asked && last["role"] == assistant {
		c.badField("answered", line, c.data.PromptField, fmt.Sprintf("`%s` ends with a message of the assistant, but the policy has to answer it", c.data.PromptField),
			"end it with a message of the user, and put the reference answer into another field")
		return "", false
	}
	return last["content"], true
}

// conversation reports whether the prompt is a list of messages that ends with one of the
// assistant, so that no answer is needed.
func (c *rowCheck) conversation(fields map[string]json.RawMessage) bool {
	var messages []struct{ Role string }
	return json.Unmarshal(fields[c.data.PromptField], &messages) == nil && len(messages) > 0 && messages[len(messages)-1].Role == assistant
}

const assistant = "assistant"
