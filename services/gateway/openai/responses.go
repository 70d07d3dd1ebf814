package openai

import (
	"encoding/json"
	"net/http"
	"slices"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

type responsesRequest struct {
	edge.Target
	edge.Sampling
	Input              json.RawMessage   `json:"input"`
	Instructions       *string           `json:"instructions"`
	Tools              []responseTool    `json:"tools"`
	ToolChoice         json.RawMessage   `json:"tool_choice"`
	ParallelToolCalls  *bool             `json:"parallel_tool_calls"`
	MaxOutputTokens    *edge.Integer     `json:"max_output_tokens"`
	Stream             bool              `json:"stream"`
	Store              *bool             `json:"store"`
	PreviousResponseID *string           `json:"previous_response_id"`
	Text               *textFormat       `json:"text"`
	Reasoning          *reasoningConfig  `json:"reasoning"`
	Include            []string          `json:"include"`
	TopLogprobs        *edge.Integer     `json:"top_logprobs"`
	Truncation         string            `json:"truncation"`
	Background         bool              `json:"background"`
	Conversation       json.RawMessage   `json:"conversation"`
	Prompt             json.RawMessage   `json:"prompt"`
	Metadata           map[string]string `json:"metadata"`
	// Of vLLM.
	ReturnTokenIDs     bool            `json:"return_token_ids"`
	ChatTemplateKwargs json.RawMessage `json:"chat_template_kwargs"`
}

type responseTool struct {
	Type string `json:"type"`
	function
}

type textFormat struct {
	Format struct {
		Type   string          `json:"type"`
		Name   string          `json:"name,omitempty"`
		Schema json.RawMessage `json:"schema,omitempty"`
		Strict *bool           `json:"strict,omitempty"`
	} `json:"format"`
	Verbosity string `json:"verbosity,omitempty"`
}

type reasoningConfig struct {
	Effort  *string `json:"effort"`
	Summary *string `json:"summary"`
}

func (h *handler) createResponse(w http.ResponseWriter, r *http.Request) error {
	var body responsesRequest
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	if err := body.check(); err != nil {
		return err
	}
	input, items, err := inputItems(body.Input)
	if err != nil {
		return err
	}
	history := input
	if body.PreviousResponseID != nil && *body.PreviousResponseID != "" {
		said, session, err := h.history(r.Context(), *body.PreviousResponseID)
		if err != nil {
			return err
		}
		history = slices.Concat(said, input)
		if body.SessionID == "" && r.PathValue("session") == "" && r.Header.Get("X-Session-ID") == "" && r.Header.Get("x-rollout-session") == "" {
			body.SessionID = session
		}
	}
	chat, err := body.chat(history)
	if err != nil {
		return err
	}
	params, err := body.Params()
	if err != nil {
		return edge.Rename(err, map[string]string{"max_tokens": "max_output_tokens"})
	}
	if params.TopLogprobs, err = edge.Top("top_logprobs", body.TopLogprobs); err != nil {
		return err
	}
	req, err := body.Named(r)
	if err != nil {
		return err
	}
	req.Prompts = []*inferencev1.Prompt{{Kind: &inferencev1.Prompt_Chat{Chat: chat}}}
	req.Params, req.Parse, req.TokenBytes = params, true, body.logprobs()
	writer := &responseWriter{body: &body, items: items, keep: func(stored *edge.StoredResponse) error { return h.Responses.KeepResponse(r.Context(), stored) }}
	return h.Complete(w, r, req, body.Stream, writer, "input")
}

// check checks the fields that only responses have.
func (b *responsesRequest) check() error {
	switch {
	case b.Background:
		return edge.Unsupported("background", "responses are sampled while the caller waits; omit it or send false")
	case edge.IsSet(b.Conversation):
		return edge.Unsupported("conversation", "name a session with `session_id`, or send `previous_response_id`")
	case edge.IsSet(b.Prompt):
		return edge.Unsupported("prompt", "prompts are not stored; send the texts as `instructions` and `input`")
	case b.Truncation != "" && b.Truncation != "disabled":
		return edge.Unsupported("truncation", "nothing is dropped from the input; omit it or send \"disabled\"")
	case len(b.Input) == 0 || string(b.Input) == "null":
		return edge.Missing("input", "`input` is missing")
	}
	if err := edge.InRange("temperature", b.Temperature, 0, 2); err != nil {
		return err
	}
	if err := edge.AtLeast("max_output_tokens", b.MaxOutputTokens, 1); err != nil {
		return err
	}
	if b.MaxOutputTokens != nil {
		b.MaxTokens = b.MaxOutputTokens
	}
	if b.Text != nil && b.Text.Format.Type != "" && b.Text.Format.Type != "text" {
		format := b.Text.Format
		b.ResponseFormat = edge.Format(format.Type, format.Schema)
	}
	return nil
}

func (b *responsesRequest) logprobs() bool {
	return slices.Contains(b.Include, "message.output_text.logprobs") || b.TopLogprobs != nil && *b.TopLogprobs > 0
}

// chat makes the chat of a history. The instructions are of this request alone.
func (b *responsesRequest) chat(history []*inferencev1.ChatMessage) (*inferencev1.Chat, error) {
	chat := &inferencev1.Chat{ParallelToolCalls: b.ParallelToolCalls}
	if b.Instructions != nil && *b.Instructions != "" {
		chat.Messages = append(chat.Messages, &inferencev1.ChatMessage{Role: "system", Content: *b.Instructions})
	}
	chat.Messages = append(chat.Messages, history...)
	if len(chat.GetMessages()) == 0 {
		return nil, edge.Missing("input", "`input` must have at least one item")
	}
	variables := Chat{ChatTemplateKwargs: b.ChatTemplateKwargs}
	if b.Reasoning != nil && b.Reasoning.Effort != nil {
		variables.ReasoningEffort = *b.Reasoning.Effort
	}
	var functions []function
	for _, t := range b.Tools {
		if t.Type != "function" {
			return nil, edge.Unsupported("tools", "only functions can be called, got the type \""+t.Type+"\"")
		}
		functions = append(functions, t.function)
	}
	var err error
	if chat.TemplateVariables, err = variables.variables(); err != nil {
		return nil, err
	}
	if chat.Tools, err = toolsOf("tools", functions); err != nil {
		return nil, err
	}
	chat.ToolChoice, err = toolChoice(b.ToolChoice, chat.GetTools())
	return chat, err
}
