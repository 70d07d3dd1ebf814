package openai

import (
	"encoding/json"
	"fmt"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

// item is one item of the input of a response.
type item struct {
	Type      string          `json:"type"`
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	CallID    string          `json:"call_id"`
	Name      string          `json:"name"`
	Arguments string          `json:"arguments"`
	Output    json.RawMessage `json:"output"`
	Summary   json.RawMessage `json:"summary"`
}

// inputItems converts the input, a text or a list of items, and returns the items as they were
// sent. Consecutive items of the assistant (reasoning, message, calls) are one message.
func inputItems(raw json.RawMessage) ([]*inferencev1.ChatMessage, []json.RawMessage, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		sent, err := json.Marshal(map[string]any{"type": "message", "role": "user", "content": []any{map[string]string{"type": "input_text", "text": text}}})
		return []*inferencev1.ChatMessage{{Role: "user", Content: text}}, []json.RawMessage{sent}, err
	}
	var sent []json.RawMessage
	if json.Unmarshal(raw, &sent) != nil {
		return nil, nil, edge.Invalid("input", "`input` must be a string or a list of items")
	}
	var out []*inferencev1.ChatMessage
	var said *inferencev1.ChatMessage // message of the assistant that the next item may belong to
	assistant := func(fresh bool) *inferencev1.ChatMessage {
		if said == nil || fresh {
			said = &inferencev1.ChatMessage{Role: "assistant"}
			out = append(out, said)
		}
		return said
	}
	for i, one := range sent {
		var it item
		at := fmt.Sprintf("input[%d]", i)
		if err := json.Unmarshal(one, &it); err != nil {
			return nil, nil, edge.Invalid(at, "`%s` must be an item, such as {\"role\": \"user\", \"content\": \"hi\"}", at)
		}
		switch it.Type {
		case "", "message":
			m := message{Role: it.Role, Content: it.Content}
			converted, err := m.proto(at)
			if err != nil {
				return nil, nil, err
			}
			if it.Role != "assistant" {
				out, said = append(out, converted), nil
				continue
			}
			assistant(said != nil && (said.GetContent() != "" || len(said.GetToolCalls()) > 0)).Content = converted.GetContent()
		case "reasoning":
			thought, err := reasoningOf(it, at)
			if err != nil {
				return nil, nil, err
			}
			fresh := said != nil && (said.GetContent() != "" || len(said.GetToolCalls()) > 0)
			assistant(fresh).Reasoning += thought
		case "function_call":
			if it.Name == "" || it.CallID == "" {
				return nil, nil, edge.Missing(at, "`%s` must have a `name` and a `call_id`", at)
			}
			m := assistant(false)
			m.ToolCalls = append(m.ToolCalls, &inferencev1.ToolCall{Id: it.CallID, Name: it.Name, Arguments: it.Arguments})
		case "function_call_output":
			if it.CallID == "" {
				return nil, nil, edge.Missing(at, "the `call_id` of `%s` is missing", at)
			}
			output, err := contentText(it.Output, at+".output", false)
			if err != nil {
				return nil, nil, err
			}
			out, said = append(out, &inferencev1.ChatMessage{Role: "tool", Content: output, ToolCallId: it.CallID}), nil
		default:
			return nil, nil, edge.Unsupported(at+".type", fmt.Sprintf("items are messages, reasoning, function_call, and function_call_output, got %q", it.Type))
		}
	}
	return out, sent, nil
}

// reasoningOf returns the thinking of a reasoning item; its summary if it has no content.
func reasoningOf(it item, at string) (string, error) {
	for _, raw := range []json.RawMessage{it.Content, it.Summary} {
		var parts []struct {
			Text string `json:"text"`
		}
		if len(raw) == 0 {
			continue
		}
		if json.Unmarshal(raw, &parts) != nil {
			return "", edge.Invalid(at, "the content and the summary of `%s` must be lists of texts", at)
		}
		text := ""
		for _, part := range parts {
			text += part.Text
		}
		if text != "" {
			return text, nil
		}
	}
	return "", nil
}
