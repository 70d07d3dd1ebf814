package input

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/nearest"
)

func (c *rowCheck) prompt(line []byte, fields map[string]json.RawMessage) (string, bool) {
	if c.data.PromptField == "" {
		return "", true
	}
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
	var role, content string
	for i, message := range messages {
		if !text(message["role"], &role) || !text(message["content"], &content) && !callsTools(role, message) {
			missing := "content"
			if !text(message["role"], &role) {
				missing = "role"
			}
			c.badField("message", line, c.data.PromptField, fmt.Sprintf("message %d of `%s` has no string `%s`", i, c.data.PromptField, missing),
				"write {\"role\": \"user\", \"content\": \"...\"}; only a message of the assistant with `tool_calls` needs no content")
			return "", false
		}
		if !slices.Contains(roles, role) {
			c.badField("role", line, c.data.PromptField, fmt.Sprintf("message %d of `%s` has the unknown role %q", i, c.data.PromptField, role), fixRole(role))
			return "", false
		}
	}
	if c.data.Asked && role == assistant {
		c.badField("answered", line, c.data.PromptField, fmt.Sprintf("`%s` ends with a message of the assistant, but the policy has to answer it", c.data.PromptField),
			"end it with a message of the user, and put the reference answer into another field")
		return "", false
	}
	return content, true
}

// conversation reports whether the prompt is a list of messages that ends with one of the
// assistant, so that no answer is needed.
func (c *rowCheck) conversation(fields map[string]json.RawMessage) bool {
	var messages []struct{ Role string }
	return json.Unmarshal(fields[c.data.PromptField], &messages) == nil && len(messages) > 0 && messages[len(messages)-1].Role == assistant
}

const assistant = "assistant"

// roles are those that chat templates know.
var roles = []string{"user", assistant, "system", "tool", "developer", "function", "ipython", "observation"}

// otherRoles are names of roles in other formats of conversations.
var otherRoles = map[string]string{"human": "user", "prompter": "user", "gpt": assistant, "bot": assistant, "model": assistant, "chatbot": assistant, "ai": assistant}

func fixRole(role string) string {
	known := otherRoles[strings.ToLower(role)]
	if known == "" {
		known = nearest.To(role, roles)
	}
	if known == "" {
		return "write \"system\", \"user\", \"assistant\", or \"tool\""
	}
	return fmt.Sprintf("write %q", known)
}

// text sets into to a JSON string and reports whether the value is one.
func text(raw json.RawMessage, into *string) bool {
	*into = ""
	return len(raw) > 0 && raw[0] == '"' && json.Unmarshal(raw, into) == nil
}

// callsTools reports whether a message of the assistant calls tools, so that it needs no content.
func callsTools(role string, message map[string]json.RawMessage) bool {
	var calls []json.RawMessage
	content := message["content"]
	return role == assistant && (len(content) == 0 || string(content) == "null") && json.Unmarshal(message["tool_calls"], &calls) == nil && len(calls) > 0
}
