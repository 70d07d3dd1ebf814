package input

import (
	"encoding/json"
	"fmt"
	"slices"
)

// message is one of a conversation; a text that is not there is nil.
type message struct {
	Role    *string `json:"role"`
	Content *string `json:"content"`
}

// plain brings a row whose completions are messages, as public datasets have them, to a prompt and texts; fields is changed. False
// where a problem was reported. python/rollout/dialogue.py tells the rules, and is the same for the workers.
func (d *Dataset) plain(line []byte, fields map[string]json.RawMessage) bool {
	var first string
	var before []message
	for _, field := range d.Completions() {
		raw := fields[field]
		if len(raw) == 0 || raw[0] != '[' {
			continue
		}
		messages := messagesIn(raw)
		if messages == nil {
			d.badField(field+" messages", line, field, fmt.Sprintf("`%s` is no list of messages with a text `role` and `content`", field),
				"write a text, or messages like {\"role\": \"assistant\", \"content\": \"...\"}")
			return false
		}
		last := messages[len(messages)-1]
		if *last.Role != assistant {
			d.badField(field+" end", line, field, fmt.Sprintf("`%s` does not end with the assistant's message", field), "end it with that: it is what is trained on")
			return false
		}
		messages = messages[:len(messages)-1]
		if first == "" {
			first, before = field, messages
		} else if !slices.EqualFunc(messages, before, same) {
			d.badField("beginnings", line, field, fmt.Sprintf("`%s` and `%s` do not begin with the same messages", first, field),
				"begin both with the same conversation: the last message alone may differ")
			return false
		}
		fields[field], _ = json.Marshal(*last.Content)
	}
	if len(before) == 0 {
		return true
	}
	if !d.ChatTemplate {
		d.badField("dialogue", line, first, fmt.Sprintf("`%s` is a conversation, which needs a chat template", first), "set `chat_template = true` in [model]")
		return false
	}
	if prompt, ok := fields[d.PromptField]; ok && string(prompt) != "null" && !isPrompt(prompt, before) {
		d.badField("another prompt", line, first, fmt.Sprintf("the messages before the last of `%s` are not those of `%s`", first, d.PromptField),
			fmt.Sprintf("write the same conversation in both, or leave `%s` out", d.PromptField))
		return false
	}
	fields[d.PromptField], _ = json.Marshal(before)
	return true
}

// messagesIn is nil where a value is anything else than messages, at least one.
func messagesIn(raw json.RawMessage) []message {
	var messages []message
	if json.Unmarshal(raw, &messages) != nil || len(messages) == 0 ||
		slices.ContainsFunc(messages, func(m message) bool { return m.Role == nil || m.Content == nil }) {
		return nil
	}
	return messages
}

// isPrompt reports whether a row's prompt is the conversation, or the text of its last message, which is the user's.
func isPrompt(prompt json.RawMessage, before []message) bool {
	var text string
	if json.Unmarshal(prompt, &text) == nil {
		last := before[len(before)-1]
		return *last.Role == "user" && *last.Content == text
	}
	return slices.EqualFunc(messagesIn(prompt), before, same)
}

func same(a, b message) bool { return *a.Role == *b.Role && *a.Content == *b.Content }
