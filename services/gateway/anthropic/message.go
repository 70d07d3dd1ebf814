package anthropic

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

type message struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// block is a part of the content of a message.
type block struct {
	Type      string          `json:"type"`
	Text      string          `json:"text"`
	Thinking  string          `json:"thinking"`
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Input     json.RawMessage `json:"input"`
	ToolUseID string          `json:"tool_use_id"`
	Content   json.RawMessage `json:"content"`
}

// blocks reads a string or a list of blocks.
func blocks(raw json.RawMessage, param string) ([]block, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil && len(raw) > 0 && string(raw) != "null" {
		return []block{{Type: "text", Text: text}}, nil
	}
	var list []block
	if json.Unmarshal(raw, &list) != nil || list == nil {
		return nil, edge.Invalid(param, "`%s` must be a string or a list of content blocks", param)
	}
	return list, nil
}

// text reads a string or a list of text blocks. It may be missing.
func text(raw json.RawMessage, param string) (string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return "", nil
	}
	list, err := blocks(raw, param)
	if err != nil {
		return "", err
	}
	var joined strings.Builder
	for _, b := range list {
		if b.Type != "text" {
			return "", edge.Unsupported(param, "the block type \""+b.Type+"\" is not supported; send text")
		}
		joined.WriteString(b.Text)
	}
	return joined.String(), nil
}

// proto converts a message. The results of tools are messages of their own. at is its place in the
// request.
func (m *message) proto(at string) ([]*inferencev1.ChatMessage, error) {
	list, err := blocks(m.Content, at+".content")
	if err != nil {
		return nil, err
	}
	switch m.Role {
	case "user":
		return user(list, at)
	case "assistant":
		said, err := assistant(list, at)
		return []*inferencev1.ChatMessage{said}, err
	case "system":
		said, err := text(m.Content, at+".content")
		return []*inferencev1.ChatMessage{{Role: "system", Content: said}}, err
	}
	param := at + ".role"
	return nil, edge.Invalid(param, "`%s` must be user or assistant, got %q", param, m.Role)
}

func user(list []block, at string) ([]*inferencev1.ChatMessage, error) {
	var out []*inferencev1.ChatMessage
	var said *inferencev1.ChatMessage // the texts between two results of tools
	for i, b := range list {
		param := fmt.Sprintf("%s.content[%d]", at, i)
		switch b.Type {
		case "text":
			if said == nil {
				said = &inferencev1.ChatMessage{Role: "user"}
				out = append(out, said)
			}
			said.Content += b.Text
		case "tool_result":
			if b.ToolUseID == "" {
				return nil, edge.Missing(param, "the `tool_use_id` of `%s` is missing", param)
			}
			result, err := text(b.Content, param+".content")
			if err != nil {
				return nil, err
			}
			out, said = append(out, &inferencev1.ChatMessage{Role: "tool", Content: result, ToolCallId: b.ToolUseID}), nil
		default:
			return nil, edge.Unsupported(param, "the block type \""+b.Type+"\" is not supported; send text")
		}
	}
	if len(out) == 0 {
		return nil, edge.Invalid(at+".content", "`%s.content` must not be empty", at)
	}
	return out, nil
}

func assistant(list []block, at string) (*inferencev1.ChatMessage, error) {
	said := &inferencev1.ChatMessage{Role: "assistant"}
	for i, b := range list {
		param := fmt.Sprintf("%s.content[%d]", at, i)
		switch b.Type {
		case "text":
			said.Content += b.Text
		case "thinking":
			said.Reasoning += b.Thinking
		case "redacted_thinking": // has no text
		case "tool_use":
			if b.Name == "" {
				return nil, edge.Missing(param, "the `name` of `%s` is missing", param)
			}
			arguments := "{}"
			if len(b.Input) > 0 && string(b.Input) != "null" {
				arguments = compact(b.Input)
			}
			said.ToolCalls = append(said.ToolCalls, &inferencev1.ToolCall{Id: b.ID, Name: b.Name, Arguments: arguments})
		default:
			return nil, edge.Unsupported(param, "the block type \""+b.Type+"\" is not supported; send text, thinking, or tool_use")
		}
	}
	return said, nil
}

// compact returns JSON that was decoded before, without spaces.
func compact(raw json.RawMessage) string {
	var out bytes.Buffer
	_ = json.Compact(&out, raw)
	return out.String()
}
