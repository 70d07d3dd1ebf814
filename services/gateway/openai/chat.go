package openai

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

type chatRequest struct {
	sampling
	Messages            []chatMessage   `json:"messages"`
	MaxCompletionTokens *integer        `json:"max_completion_tokens"`
	Logprobs            bool            `json:"logprobs"`
	TopLogprobs         *integer        `json:"top_logprobs"`
	Tools               []any           `json:"tools"`
	Functions           []any           `json:"functions"`
	ResponseFormat      *responseFormat `json:"response_format"`
}

type responseFormat struct {
	Type string `json:"type"`
}

type chatMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

func (h *handler) chat(w http.ResponseWriter, r *http.Request) error {
	var body chatRequest
	if err := decode(r, &body); err != nil {
		return err
	}
	chat, err := body.chat()
	if err != nil {
		return err
	}
	req, err := body.request(r)
	if err != nil {
		return err
	}
	req.Prompts = []*inferencev1.Prompt{{Kind: &inferencev1.Prompt_Chat{Chat: chat}}}
	format := chatFormat{logprobs: body.Logprobs}
	return h.answer(w, r, req, format, body.sampling, "messages")
}

// chat checks the fields that only chats have, and returns the messages.
func (b *chatRequest) chat() (*inferencev1.Chat, error) {
	switch {
	case len(b.Messages) == 0:
		return nil, &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: "messages", Code: "missing_required_parameter", Message: "`messages` must have at least one message"}
	case len(b.Tools) > 0:
		return nil, unsupported("tools", "this endpoint only samples text")
	case len(b.Functions) > 0:
		return nil, unsupported("functions", "this endpoint only samples text")
	case b.TopLogprobs != nil && *b.TopLogprobs > 0:
		return nil, unsupported("top_logprobs", "only the logprobs of sampled tokens are recorded; send `logprobs: true` without it")
	case b.ResponseFormat != nil && b.ResponseFormat.Type != "" && b.ResponseFormat.Type != "text":
		return nil, unsupported("response_format", "only `text` is sampled")
	case b.MaxTokens != nil && b.MaxCompletionTokens != nil && *b.MaxTokens != *b.MaxCompletionTokens:
		return nil, invalid("max_tokens", "`max_tokens` is %d and `max_completion_tokens` is %d; send one", *b.MaxTokens, *b.MaxCompletionTokens)
	case b.MaxCompletionTokens != nil:
		if *b.MaxCompletionTokens < 1 {
			return nil, invalid("max_completion_tokens", "`max_completion_tokens` must be at least 1, got %d", *b.MaxCompletionTokens)
		}
		b.MaxTokens = b.MaxCompletionTokens
	}
	chat := &inferencev1.Chat{}
	for i, m := range b.Messages {
		role := m.Role
		switch role {
		case "developer":
			role = "system" // OpenAI's newer name for it
		case "system", "user", "assistant", "tool":
		default:
			param := fmt.Sprintf("messages[%d].role", i)
			return nil, invalid(param, "`%s` must be system, developer, user, assistant, or tool, got %q", param, m.Role)
		}
		text, err := m.text(i)
		if err != nil {
			return nil, err
		}
		chat.Messages = append(chat.Messages, &inferencev1.ChatMessage{Role: role, Content: text})
	}
	return chat, nil
}

// text reads a string, or a list of text parts. The message of an assistant may be empty.
func (m chatMessage) text(i int) (string, error) {
	param := fmt.Sprintf("messages[%d].content", i)
	if len(m.Content) == 0 || string(m.Content) == "null" {
		if m.Role == "assistant" {
			return "", nil
		}
		return "", invalid(param, "`%s` is missing", param)
	}
	var text string
	if json.Unmarshal(m.Content, &text) == nil {
		return text, nil
	}
	var parts []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if json.Unmarshal(m.Content, &parts) != nil {
		return "", invalid(param, "`%s` must be a string or a list of text parts", param)
	}
	var joined strings.Builder
	for _, part := range parts {
		if part.Type != "text" {
			return "", unsupported(param, "the part type \""+part.Type+"\" is not supported; send text")
		}
		joined.WriteString(part.Text)
	}
	return joined.String(), nil
}

// chatFormat writes completions as chat completions.
type chatFormat struct{ logprobs bool }

func (chatFormat) id() string { return "chatcmpl-" }

func (f chatFormat) object(stream bool) string {
	if stream {
		return "chat.completion.chunk"
	}
	return "chat.completion"
}

type chatText struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
	Refusal *string `json:"refusal,omitempty"`
}

type chatChoice struct {
	Index        uint32        `json:"index"`
	Message      *chatText     `json:"message,omitempty"`
	Delta        *chatText     `json:"delta,omitempty"`
	Logprobs     *chatLogprobs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
}

type chatLogprobs struct {
	Content []chatLogprob `json:"content"`
}

type chatLogprob struct {
	Token       string  `json:"token"`
	Logprob     float32 `json:"logprob"`
	Bytes       []int   `json:"bytes"`
	TopLogprobs []any   `json:"top_logprobs"`
}

func (f chatFormat) choice(c *completion) any {
	return chatChoice{
		Index: c.index, Message: &chatText{Role: "assistant", Content: ptr(c.text())}, Logprobs: f.score(c.pieces), FinishReason: reason(c.finish),
	}
}

func (f chatFormat) first(index uint32) any {
	return chatChoice{Index: index, Delta: &chatText{Role: "assistant", Content: ptr("")}}
}

func (f chatFormat) chunk(index uint32, p piece) any {
	choice := chatChoice{Index: index, Delta: &chatText{}, FinishReason: reason(p.finish)}
	if p.text != "" {
		choice.Delta.Content = &p.text
	}
	if len(p.logprobs) > 0 {
		choice.Logprobs = f.score([]piece{p})
	}
	return choice
}

func (f chatFormat) score(pieces []piece) *chatLogprobs {
	if !f.logprobs {
		return nil
	}
	scored := &chatLogprobs{Content: []chatLogprob{}}
	for _, p := range pieces {
		for i, logprob := range p.logprobs {
			token := p.token(i)
			bytes := make([]int, len(token))
			for j := range len(token) {
				bytes[j] = int(token[j])
			}
			scored.Content = append(scored.Content, chatLogprob{Token: token, Logprob: finite(logprob), Bytes: bytes, TopLogprobs: []any{}})
		}
	}
	return scored
}
