// Package anthropic is the dialect of Anthropic's Messages API: messages, whole and streamed, and
// count_tokens, so that Anthropic's clients work unmodified.
//
// A last message of the assistant is continued. `thinking` sets the variable enable_thinking of the
// chat template. With `return_token_ids` a message has prompt_token_ids, token_ids, and
// token_logprobs; `seed` and the other sampling fields of vLLM are accepted too.
package anthropic

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

const maxTools = 128

// Routes are the endpoints of the dialect.
func Routes(e *edge.Edge) []edge.Route {
	h := &handler{e}
	route := func(path, about string, serve func(w http.ResponseWriter, r *http.Request) error, required ...string) edge.Route {
		return edge.Route{
			Method: http.MethodPost, Path: path, Tag: "Anthropic", About: about, Request: request{}, Required: required, Serve: serve,
			Body: errorBody, Session: true,
		}
	}
	return []edge.Route{
		route("/v1/messages", "Complete messages.", h.messages, "model", "max_tokens", "messages"),
		route("/v1/messages/count_tokens", "Count the tokens of messages.", h.countTokens, "model", "messages"),
	}
}

type handler struct{ *edge.Edge }

// errorBody is an error in Anthropic's shape.
func errorBody(e *edge.Error) any {
	kind := map[int]string{
		http.StatusUnauthorized: "authentication_error", http.StatusForbidden: "permission_error", http.StatusNotFound: "not_found_error",
		http.StatusRequestEntityTooLarge: "request_too_large", http.StatusTooManyRequests: "rate_limit_error", http.StatusInternalServerError: "api_error",
		http.StatusServiceUnavailable: "overloaded_error", http.StatusRequestTimeout: "timeout_error",
	}[e.Status]
	if kind == "" {
		kind = "invalid_request_error"
	}
	type failure struct {
		Type    string `json:"type"`
		Message string `json:"message"`
		Param   string `json:"param,omitempty"`
		edge.Facts
	}
	return struct {
		Type  string  `json:"type"`
		Error failure `json:"error"`
	}{"error", failure{Type: kind, Message: e.Error(), Param: e.Param, Facts: e.Facts()}}
}

type request struct {
	edge.Target
	edge.Sampling
	Messages       []message       `json:"messages"`
	System         json.RawMessage `json:"system"`
	StopSequences  []string        `json:"stop_sequences"`
	Stream         bool            `json:"stream"`
	Tools          []tool          `json:"tools"`
	ToolChoice     *toolChoice     `json:"tool_choice"`
	Thinking       *thinking       `json:"thinking"`
	OutputConfig   *outputConfig   `json:"output_config"`
	OutputFormat   *outputFormat   `json:"output_format"`
	MCPServers     json.RawMessage `json:"mcp_servers"`
	Container      json.RawMessage `json:"container"`
	ReturnTokenIDs bool            `json:"return_token_ids"`
}

type thinking struct {
	Type string `json:"type"`
}

type outputConfig struct {
	Effort string        `json:"effort"`
	Format *outputFormat `json:"format"`
}

type outputFormat struct {
	Type   string          `json:"type"`
	Schema json.RawMessage `json:"schema"`
}

type tool struct {
	Type        string          `json:"type"`
	Name        string          `json:"name"`
	Description string          `json:"description"`
	InputSchema json.RawMessage `json:"input_schema"`
	Strict      bool            `json:"strict"`
}

type toolChoice struct {
	Type            string `json:"type"`
	Name            string `json:"name"`
	DisableParallel bool   `json:"disable_parallel_tool_use"`
}

func (h *handler) messages(w http.ResponseWriter, r *http.Request) error {
	var body request
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	if body.MaxTokens == nil {
		return edge.Missing("max_tokens", "`max_tokens` is missing")
	}
	if err := edge.AtLeast("max_tokens", body.MaxTokens, 1); err != nil {
		return err
	}
	chat, err := body.chat()
	if err != nil {
		return err
	}
	if err := body.sampling(); err != nil {
		return err
	}
	params, err := body.Params()
	if err != nil {
		return edge.Rename(err, map[string]string{"stop": "stop_sequences", "response_format": "output_format"})
	}
	req, err := body.Named(r)
	if err != nil {
		return err
	}
	req.Prompts, req.Params, req.Parse = []*inferencev1.Prompt{{Kind: &inferencev1.Prompt_Chat{Chat: chat}}}, params, true
	return h.Complete(w, r, req, body.Stream, &writer{body: &body}, "messages")
}

// sampling converts the fields whose names or ranges are Anthropic's.
func (b *request) sampling() error {
	if err := edge.InRange("temperature", b.Temperature, 0, 1); err != nil {
		return err
	}
	if len(b.StopSequences) > 0 {
		b.Stop, _ = json.Marshal(b.StopSequences)
	}
	format := b.OutputFormat
	if format == nil && b.OutputConfig != nil {
		format = b.OutputConfig.Format
	}
	if format != nil {
		b.ResponseFormat = edge.Format(format.Type, format.Schema)
	}
	return nil
}

func (h *handler) countTokens(w http.ResponseWriter, r *http.Request) error {
	var body request
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	chat, err := body.chat()
	if err != nil {
		return err
	}
	req, err := body.Named(r)
	if err != nil {
		return err
	}
	prompt := &inferencev1.Prompt{Kind: &inferencev1.Prompt_Chat{Chat: chat}}
	got, err := h.Backend.Tokenize(r.Context(), req.GetModel(), &inferencev1.TokenizeRequest{Prompts: []*inferencev1.Prompt{prompt}})
	if err != nil {
		return edge.ErrorOf(err, req.GetModel(), "messages")
	}
	count := 0
	for _, p := range got.GetPrompts() {
		count += len(p.GetIds())
	}
	return edge.WriteJSON(w, http.StatusOK, map[string]int{"input_tokens": count})
}

// chat converts the messages and the tools.
func (b *request) chat() (*inferencev1.Chat, error) {
	switch {
	case len(b.Messages) == 0:
		return nil, edge.Missing("messages", "`messages` must have at least one message")
	case edge.IsSet(b.MCPServers):
		return nil, edge.Unsupported("mcp_servers", "call the servers yourself and offer their tools as `tools`")
	case edge.IsSet(b.Container):
		return nil, edge.Unsupported("container", "no code is run")
	}
	chat := &inferencev1.Chat{}
	system, err := text(b.System, "system")
	if err != nil {
		return nil, err
	}
	if system != "" {
		chat.Messages = append(chat.Messages, &inferencev1.ChatMessage{Role: "system", Content: system})
	}
	for i := range b.Messages {
		converted, err := b.Messages[i].proto(fmt.Sprintf("messages[%d]", i))
		if err != nil {
			return nil, err
		}
		chat.Messages = append(chat.Messages, converted...)
	}
	last := chat.GetMessages()[len(chat.GetMessages())-1]
	if last.GetRole() == "assistant" {
		if len(last.GetToolCalls()) > 0 {
			return nil, edge.Invalid("messages", "the last message calls tools; add the results of its calls as `tool_result` blocks")
		}
		chat.ContinueFinalMessage = true
	}
	if err := b.template(chat); err != nil {
		return nil, err
	}
	if chat.Tools, err = b.tools(); err != nil {
		return nil, err
	}
	return chat, b.choose(chat)
}

// template sets the variables of the chat template.
func (b *request) template(chat *inferencev1.Chat) error {
	variables := map[string]any{}
	if b.Thinking != nil {
		if !slices.Contains([]string{"enabled", "disabled", "adaptive"}, b.Thinking.Type) {
			return edge.Invalid("thinking", "`thinking.type` must be enabled, disabled, or adaptive, got %q", b.Thinking.Type)
		}
		variables["enable_thinking"] = b.Thinking.Type != "disabled"
	}
	if b.OutputConfig != nil && b.OutputConfig.Effort != "" {
		variables["reasoning_effort"] = b.OutputConfig.Effort
	}
	if len(variables) == 0 {
		return nil
	}
	raw, err := json.Marshal(variables)
	chat.TemplateVariables = string(raw)
	return err
}

func (b *request) tools() ([]*inferencev1.Tool, error) {
	if len(b.Tools) > maxTools {
		return nil, edge.Invalid("tools", "`tools` must have at most %d tools, got %d", maxTools, len(b.Tools))
	}
	var out []*inferencev1.Tool
	for i, t := range b.Tools {
		switch {
		case t.Type != "" && t.Type != "custom":
			return nil, edge.Unsupported("tools", "tools are run by the caller, got the type \""+t.Type+"\"")
		case t.Name == "":
			return nil, edge.Missing("tools", "the name of tool %d in `tools` is missing", i)
		case !strings.HasPrefix(string(t.InputSchema), "{"):
			return nil, edge.Invalid("tools", "the `input_schema` of the tool %s must be a JSON schema", t.Name)
		}
		out = append(out, &inferencev1.Tool{Name: t.Name, Description: t.Description, Parameters: compact(t.InputSchema), Strict: t.Strict})
	}
	return out, nil
}

func (b *request) choose(chat *inferencev1.Chat) error {
	choice := b.ToolChoice
	if choice == nil {
		return nil
	}
	if choice.DisableParallel {
		chat.ParallelToolCalls = edge.Ptr(false)
	}
	required := &inferencev1.ToolChoice{Mode: inferencev1.ToolChoice_MODE_REQUIRED}
	switch choice.Type {
	case "auto":
		return nil
	case "none":
		chat.ToolChoice = &inferencev1.ToolChoice{Mode: inferencev1.ToolChoice_MODE_NONE}
		return nil
	case "any":
		if len(chat.GetTools()) == 0 {
			return edge.Invalid("tool_choice", "`tool_choice` is any, but the request has no `tools`")
		}
	case "tool":
		if !slices.ContainsFunc(chat.GetTools(), func(t *inferencev1.Tool) bool { return t.GetName() == choice.Name }) {
			return edge.Invalid("tool_choice", "`tool_choice` names the tool %q, which is not one of the tools of the request", choice.Name)
		}
		required.Name = choice.Name
	default:
		return edge.Invalid("tool_choice", "`tool_choice.type` must be auto, any, tool, or none, got %q", choice.Type)
	}
	chat.ToolChoice = required
	return nil
}
