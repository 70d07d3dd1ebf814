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
	MaxCompletionTokens *whole          `json:"max_completion_tokens"`
	Logprobs            bool            `json:"logprobs"`
	TopLogprobs         *whole          `json:"top_logprobs"`
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
	form := chatForm{logprobs: body.Logprobs}
	return h.answer(w, r, req, form, body.sampling, "messages")
}

// chat checks the fields of chats alone and returns the messages.
func (b *chatRequest) chat() (*inferencev1.Chat, error) {
	switch {
	case len(b.Messages) == 0:
		return nil, &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: "messages", Code: "missing_required_parameter", Message: "`messages` must hold at least one message"}
	case len(b.Tools) > 0:
		return nil, unsupported("tools", "this endpoint samples text")
	case len(b.Functions) > 0:
		return nil, unsupported("functions", "this endpoint samples text")
	case b.TopLogprobs != nil && *b.TopLogprobs > 0:
		return nil, unsupported("top_logprobs", "logprobs of the sampled tokens alone are kept; send `logprobs: true` without it")
	case b.ResponseFormat != nil && b.ResponseFormat.Type != "" && b.ResponseFormat.Type != "text":
		return nil, unsupported("response_format", "only `text` is sampled")
	case b.MaxTokens != nil && b.MaxCompletionTokens != nil && *b.MaxTokens != *b.MaxCompletionTokens:
		return nil, invalid("max_tokens", "`max_tokens` is %d and `max_completion_tokens` is %d; send one", *b.MaxTokens, *b.MaxCompletionTokens)
	case b.MaxCompletionTokens != nil:
		if *b.MaxCompletionTokens < 1 {
			return nil, invalid("max_completion_tokens", "`max_completion_tokens` must be at least 1, it is %d", *b.MaxCompletionTokens)
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
			return nil, invalid(param, "`%s` must be one of system, developer, user, assistant and tool, it is %q", param, m.Role)
		}
		text, err := m.text(i)
		if err != nil {
			return nil, err
		}
		chat.Messages = append(chat.Messages, &inferencev1.ChatMessage{Role: role, Content: text})
	}
	return chat, nil
}

// text reads a text, or a list of text parts. An assistant's message may have none.
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
		return "", invalid(param, "`%s` must be a text or a list of text parts", param)
	}
	var joined strings.Builder
	for _, part := range parts {
		if part.Type != "text" {
			return "", unsupported(param, "parts of type \""+part.Type+"\" can't be read; send text")
		}
		joined.WriteString(part.Text)
	}
	return joined.String(), nil
}

// chatForm renders answers as chat completions.
type chatForm struct{ logprobs bool }

func (chatForm) id() string { return "chatcmpl-" }

func (f chatForm) object(stream bool) string {
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

func (f chatForm) whole(c *completion) any {
	return chatChoice{
		Index: c.index, Message: &chatText{Role: "assistant", Content: ptr(c.text())}, Logprobs: f.score(c.pieces), FinishReason: reason(c.finish),
	}
}

func (f chatForm) open(index uint32) any {
	return chatChoice{Index: index, Delta: &chatText{Role: "assistant", Content: ptr("")}}
}

func (f chatForm) piece(index uint32, p piece) any {
	choice := chatChoice{Index: index, Delta: &chatText{}, FinishReason: reason(p.finish)}
	if p.text != "" {
		choice.Delta.Content = &p.text
	}
	if len(p.logprobs) > 0 {
		choice.Logprobs = f.score([]piece{p})
	}
	return choice
}

func (f chatForm) score(pieces []piece) *chatLogprobs {
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
