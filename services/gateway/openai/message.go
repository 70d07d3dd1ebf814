package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

const maxTools = 128

// Chat is the fields of a request that make a chat.
type Chat struct {
	Messages             []message       `json:"messages"`
	Tools                []tool          `json:"tools"`
	ToolChoice           json.RawMessage `json:"tool_choice"`
	ParallelToolCalls    *bool           `json:"parallel_tool_calls"`
	ChatTemplate         json.RawMessage `json:"chat_template"`
	ChatTemplateKwargs   json.RawMessage `json:"chat_template_kwargs"`
	ReasoningEffort      string          `json:"reasoning_effort"`
	AddGenerationPrompt  *bool           `json:"add_generation_prompt"`
	AddSpecialTokens     *bool           `json:"add_special_tokens"`
	ContinueFinalMessage bool            `json:"continue_final_message"`
	// Before tools.
	Functions    []function      `json:"functions"`
	FunctionCall json.RawMessage `json:"function_call"`
}

type message struct {
	Role             string          `json:"role"`
	Content          json.RawMessage `json:"content"`
	Name             string          `json:"name"`
	ReasoningContent string          `json:"reasoning_content"`
	Reasoning        json.RawMessage `json:"reasoning"` // the newer name of vLLM
	ToolCalls        []toolCall      `json:"tool_calls"`
	ToolCallID       string          `json:"tool_call_id"`
	FunctionCall     *functionCall   `json:"function_call"`
}

type tool struct {
	Type     string   `json:"type"`
	Function function `json:"function"`
}

type function struct {
	Name        string          `json:"name"`
	Description string          `json:"description"`
	Parameters  json.RawMessage `json:"parameters"`
	Strict      bool            `json:"strict"`
}

type toolCall struct {
	Index    *uint32      `json:"index,omitempty"` // in streams
	ID       string       `json:"id,omitempty"`
	Type     string       `json:"type,omitempty"`
	Function functionCall `json:"function"`
}

type functionCall struct {
	Name      string `json:"name,omitempty"`
	Arguments string `json:"arguments"`
}

// Proto checks the fields and converts them.
func (b *Chat) Proto() (*inferencev1.Chat, error) {
	switch {
	case len(b.Messages) == 0:
		return nil, edge.Missing("messages", "`messages` must have at least one message")
	case edge.IsSet(b.ChatTemplate):
		return nil, edge.Unsupported("chat_template", "the chat template of the tokenizer is used")
	case b.AddSpecialTokens != nil && *b.AddSpecialTokens:
		return nil, edge.Unsupported("add_special_tokens", "the chat template adds the special tokens of a chat; omit it or send false")
	case len(b.Tools) > 0 && len(b.Functions) > 0:
		return nil, edge.Invalid("functions", "`functions` is the old form of `tools`; send one of them")
	case b.AddGenerationPrompt != nil && *b.AddGenerationPrompt == b.ContinueFinalMessage:
		return nil, edge.Invalid("add_generation_prompt", "`add_generation_prompt` must be the opposite of `continue_final_message`")
	case b.ContinueFinalMessage && b.Messages[len(b.Messages)-1].Role != "assistant":
		return nil, edge.Invalid("continue_final_message", "`continue_final_message` requires a last message of the assistant, got %q", b.Messages[len(b.Messages)-1].Role)
	}
	chat := &inferencev1.Chat{ParallelToolCalls: b.ParallelToolCalls, ContinueFinalMessage: b.ContinueFinalMessage}
	var err error
	if chat.Messages, err = b.messages(); err != nil {
		return nil, err
	}
	if chat.TemplateVariables, err = b.variables(); err != nil {
		return nil, err
	}
	functions, param := b.Functions, "functions"
	for i, t := range b.Tools {
		if t.Type != "function" {
			return nil, edge.Unsupported(fmt.Sprintf("tools[%d].type", i), fmt.Sprintf("only functions can be called, got %q", t.Type))
		}
		functions, param = append(functions, t.Function), "tools"
	}
	if chat.Tools, err = toolsOf(param, functions); err != nil {
		return nil, err
	}
	choice := b.ToolChoice
	if len(b.Functions) > 0 {
		choice = b.FunctionCall
	}
	if chat.ToolChoice, err = toolChoice(choice, chat.GetTools()); err != nil {
		return nil, err
	}
	return chat, nil
}

// toolsOf converts functions. param is the field that has them.
func toolsOf(param string, functions []function) ([]*inferencev1.Tool, error) {
	if len(functions) > maxTools {
		return nil, edge.Invalid(param, "`%s` must have at most %d tools, got %d", param, maxTools, len(functions))
	}
	var out []*inferencev1.Tool
	for i, f := range functions {
		if f.Name == "" {
			return nil, edge.Missing(param, "the name of tool %d in `%s` is missing", i, param)
		}
		schema := ""
		if len(f.Parameters) > 0 && string(f.Parameters) != "null" {
			if f.Parameters[0] != '{' {
				return nil, edge.Invalid(param, "the parameters of the tool %s must be a JSON schema", f.Name)
			}
			var compact bytes.Buffer
			_ = json.Compact(&compact, f.Parameters) // valid: it was decoded
			schema = compact.String()
		}
		out = append(out, &inferencev1.Tool{Name: f.Name, Description: f.Description, Parameters: schema, Strict: f.Strict})
	}
	return out, nil
}

// toolChoice reads none, auto, required, or an object that names a tool.
func toolChoice(raw json.RawMessage, tools []*inferencev1.Tool) (*inferencev1.ToolChoice, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var mode string
	var named struct {
		Type     string   `json:"type"`
		Name     string   `json:"name"`
		Function function `json:"function"`
	}
	if json.Unmarshal(raw, &mode) != nil {
		if json.Unmarshal(raw, &named) != nil {
			return nil, edge.Invalid("tool_choice", "`tool_choice` must be none, auto, required, or an object that names a function")
		}
		name := named.Function.Name
		if name == "" {
			name = named.Name
		}
		if name == "" || named.Type != "function" && named.Type != "" {
			return nil, edge.Invalid("tool_choice", "`tool_choice` must name a function, such as {\"type\": \"function\", \"function\": {\"name\": \"search\"}}")
		}
		for _, t := range tools {
			if t.GetName() == name {
				return &inferencev1.ToolChoice{Mode: inferencev1.ToolChoice_MODE_REQUIRED, Name: name}, nil
			}
		}
		return nil, edge.Invalid("tool_choice", "`tool_choice` names the tool %q, which is not one of the tools of the request", name)
	}
	switch mode {
	case "auto":
		return nil, nil
	case "none":
		return &inferencev1.ToolChoice{Mode: inferencev1.ToolChoice_MODE_NONE}, nil
	case "required":
		if len(tools) == 0 {
			return nil, edge.Invalid("tool_choice", "`tool_choice` is required, but the request has no `tools`")
		}
		return &inferencev1.ToolChoice{Mode: inferencev1.ToolChoice_MODE_REQUIRED}, nil
	}
	return nil, edge.Invalid("tool_choice", "`tool_choice` must be none, auto, required, or an object that names a function, got %q", mode)
}

// variables returns the variables of the chat template, as JSON.
func (b *Chat) variables() (string, error) {
	raw := b.ChatTemplateKwargs
	if len(raw) == 0 || string(raw) == "null" {
		raw = json.RawMessage("{}")
	}
	var sent map[string]json.RawMessage
	if json.Unmarshal(raw, &sent) != nil {
		return "", edge.Invalid("chat_template_kwargs", "`chat_template_kwargs` must be an object")
	}
	if _, ok := sent["reasoning_effort"]; !ok && b.ReasoningEffort != "" {
		sent["reasoning_effort"], _ = json.Marshal(b.ReasoningEffort)
	}
	if len(sent) == 0 {
		return "", nil
	}
	text, err := json.Marshal(sent)
	return string(text), err
}

func (b *Chat) messages() ([]*inferencev1.ChatMessage, error) {
	var out []*inferencev1.ChatMessage
	for i := range b.Messages {
		m, err := b.Messages[i].proto(fmt.Sprintf("messages[%d]", i))
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

// proto converts a message. at is its place in the request.
func (m *message) proto(at string) (*inferencev1.ChatMessage, error) {
	out := &inferencev1.ChatMessage{Role: m.Role, Name: m.Name, Reasoning: m.ReasoningContent, ToolCallId: m.ToolCallID}
	switch m.Role {
	case "developer":
		out.Role = "system" // OpenAI's newer name for it
	case "function":
		out.Role = "tool" // the older name
	case "system", "user", "assistant", "tool":
	default:
		param := at + ".role"
		return nil, edge.Invalid(param, "`%s` must be system, developer, user, assistant, or tool, got %q", param, m.Role)
	}
	if out.GetReasoning() == "" {
		_ = json.Unmarshal(m.Reasoning, &out.Reasoning) // other types are not vLLM's and are ignored
	}
	calls := m.ToolCalls
	if m.FunctionCall != nil {
		calls = append(calls, toolCall{Function: *m.FunctionCall})
	}
	for i, call := range calls {
		switch {
		case m.Role != "assistant":
			return nil, edge.Invalid(at+".tool_calls", "only messages of the assistant have `tool_calls`")
		case call.Function.Name == "":
			return nil, edge.Missing(at+".tool_calls", "the name of call %d in `%s.tool_calls` is missing", i, at)
		}
		out.ToolCalls = append(out.ToolCalls, &inferencev1.ToolCall{Id: call.ID, Name: call.Function.Name, Arguments: call.Function.Arguments})
	}
	var err error
	out.Content, err = contentText(m.Content, at+".content", m.Role == "assistant")
	return out, err
}

// contentText reads a string, or a list of text parts. It may be missing if optional.
func contentText(raw json.RawMessage, param string, optional bool) (string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		if optional {
			return "", nil
		}
		return "", edge.Invalid(param, "`%s` is missing", param)
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text, nil
	}
	var parts []struct {
		Type    string `json:"type"`
		Text    string `json:"text"`
		Refusal string `json:"refusal"`
	}
	if json.Unmarshal(raw, &parts) != nil {
		return "", edge.Invalid(param, "`%s` must be a string or a list of text parts", param)
	}
	var joined strings.Builder
	for _, part := range parts {
		switch part.Type {
		case "text", "input_text", "output_text":
			joined.WriteString(part.Text)
		case "refusal":
			joined.WriteString(part.Refusal)
		default:
			return "", edge.Unsupported(param, "the part type \""+part.Type+"\" is not supported; send text")
		}
	}
	return joined.String(), nil
}
