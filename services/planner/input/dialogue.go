package input

import (
	"encoding/json"
	"fmt"
	"slices"
)

// message is one message of a conversation; an absent string is nil.
type message struct {
	Role    *string `json:"role"`
	Content *string `json:"content"`
}

// plain replaces completions that are messages, in fields, by a prompt and texts. It returns false
// if it reported a problem. python/rollout/dialogue.py states the rules and is the same code for
// workers.
func (c *rowCheck) plain(line []byte, fields map[string]json.RawMessage) bool {
	var first string
	var before []message
	for _, field := range c.data.Completions() {
		raw := fields[field]
		if len(raw) == 0 || raw[0] != '[' {
			continue
		}
		messages := messagesIn(raw)
		if messages == nil {
			c.badField(field+" messages", line, field, fmt.Sprintf("`%s` is not a list of messages with the strings `role` and `content`", field),
				"write a string, or messages like {\"role\": \"assistant\", \"content\": \"...\"}")
			return false
		}
		last := messages[len(messages)-1]
		if *last.Role != assistant {
			c.badField(field+" end", line, field, fmt.Sprintf("`%s` does not end with the assistant's message", field), "add that message: the run trains on it")
			return false
		}
		messages = messages[:len(messages)-1]
		if first == "" {
			first, before = field, messages
		} else if !slices.EqualFunc(messages, before, same) {
			c.badField("beginnings", line, field, fmt.Sprintf("`%s` and `%s` do not start with the same messages", first, field),
				"start both with the same conversation: only the last message may differ")
			return false
		}
		fields[field], _ = json.Marshal(*last.Content)
	}
	if len(before) == 0 {
		return true
	}
	if !c.data.ChatTemplate {
		c.badField("dialogue", line, first, fmt.Sprintf("`%s` is a conversation, which needs a chat template", first), "set `chat_template = true` in [model]")
		return false
	}
	if prompt, ok := fields[c.data.PromptField]; ok && string(prompt) != "null" && !isPrompt(prompt, before) {
		c.badField("another prompt", line, first, fmt.Sprintf("the messages before the last one of `%s` differ from `%s`", first, c.data.PromptField),
			fmt.Sprintf("write the same conversation in both, or remove `%s`", c.data.PromptField))
		return false
	}
	fields[c.data.PromptField], _ = json.Marshal(before)
	return true
}

// messagesIn is nil unless the value is a list of at least one message.
func messagesIn(raw json.RawMessage) []message {
	var messages []message
	if json.Unmarshal(raw, &messages) != nil || len(messages) == 0 ||
		slices.ContainsFunc(messages, func(m message) bool { return m.Role == nil || m.Content == nil }) {
		return nil
	}
	return messages
}

// isPrompt reports whether the prompt of a row is the conversation, or the text of its last
// message, sent by the user.
func isPrompt(prompt json.RawMessage, before []message) bool {
	var text string
	if json.Unmarshal(prompt, &text) == nil {
		last := before[len(before)-1]
		return *last.Role == "user" && *last.Content == text
	}
	return slices.EqualFunc(messagesIn(prompt), before, same)
}

func same(a, b message) bool { return *a.Role == *b.Role && *a.Content == *b.Content }
