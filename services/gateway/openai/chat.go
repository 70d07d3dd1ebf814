package openai

import (
	"encoding/json"
	"net/http"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

type chatRequest struct {
	common
	Chat
	MaxCompletionTokens *edge.Integer   `json:"max_completion_tokens"`
	Logprobs            bool            `json:"logprobs"`
	TopLogprobs         *edge.Integer   `json:"top_logprobs"`
	Modalities          []string        `json:"modalities"`
	Audio               json.RawMessage `json:"audio"`
}

func (h *handler) chat(w http.ResponseWriter, r *http.Request) error {
	var body chatRequest
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	if err := body.check(); err != nil {
		return err
	}
	chat, err := body.Proto()
	if err != nil {
		return err
	}
	req, err := body.request(r)
	if err != nil {
		return err
	}
	if req.Params.TopLogprobs, err = edge.Top("top_logprobs", body.TopLogprobs); err != nil {
		return err
	}
	req.Prompts = []*inferencev1.Prompt{{Kind: &inferencev1.Prompt_Chat{Chat: chat}}}
	req.Parse, req.TokenBytes = true, body.Logprobs
	writer := &chatWriter{
		chunks: chunks{prefix: "chatcmpl-", object: "chat.completion.chunk", options: body.StreamOptions},
		body:   &body, opened: map[uint32]bool{}, called: map[uint32]bool{},
	}
	return h.Complete(w, r, req, body.Stream, writer, "messages")
}

// check checks the fields that only chats have.
func (b *chatRequest) check() error {
	switch {
	case b.TopLogprobs != nil && *b.TopLogprobs > 0 && !b.Logprobs:
		return edge.Invalid("top_logprobs", "`top_logprobs` requires `logprobs: true`")
	case b.MaxTokens != nil && b.MaxCompletionTokens != nil && *b.MaxTokens != *b.MaxCompletionTokens:
		return edge.Invalid("max_tokens", "`max_tokens` is %d and `max_completion_tokens` is %d; send one", *b.MaxTokens, *b.MaxCompletionTokens)
	case edge.IsSet(b.Audio):
		return edge.Unsupported("audio", "only text is sampled")
	}
	for _, modality := range b.Modalities {
		if modality != "text" {
			return edge.Unsupported("modalities", "only text is sampled")
		}
	}
	if err := edge.AtLeast("max_tokens", b.MaxTokens, 1); err != nil {
		return err
	}
	if b.MaxCompletionTokens == nil {
		return nil
	}
	b.MaxTokens = b.MaxCompletionTokens
	return edge.AtLeast("max_completion_tokens", b.MaxCompletionTokens, 1)
}

// chatWriter writes completions as chat completions.
type chatWriter struct {
	chunks
	body   *chatRequest
	opened map[uint32]bool // choices of a stream that have begun
	called map[uint32]bool // choices that have a tool call
}

type chatText struct {
	Role             string        `json:"role,omitempty"`
	Content          *string       `json:"content,omitempty"`
	ReasoningContent string        `json:"reasoning_content,omitempty"`
	ToolCalls        []toolCall    `json:"tool_calls,omitempty"`
	FunctionCall     *functionCall `json:"function_call,omitempty"`
	Refusal          *string       `json:"refusal,omitempty"`
}

// wholeText is the message of a response that is not streamed: its content may be null.
type wholeText struct {
	chatText
	Content *string `json:"content"`
}

type chatChoice struct {
	Index        uint32        `json:"index"`
	Message      *wholeText    `json:"message,omitempty"`
	Delta        *chatText     `json:"delta,omitempty"`
	Logprobs     *chatLogprobs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
	extras
}

type chatLogprobs struct {
	Content []sampledLogprob `json:"content"`
}

type tokenLogprob struct {
	Token   string  `json:"token"`
	Logprob float32 `json:"logprob"`
	Bytes   []int   `json:"bytes"`
}

type sampledLogprob struct {
	tokenLogprob
	TopLogprobs []tokenLogprob `json:"top_logprobs"`
}

func logprobOf(t edge.Token, asID bool) tokenLogprob {
	return tokenLogprob{Token: t.Label(asID), Logprob: edge.Finite(t.Logprob), Bytes: t.ByteValues()}
}

// ChatLogprobs returns the logprobs of tokens in the form of chat completions.
func ChatLogprobs(tokens []edge.Token, asID bool) *chatLogprobs {
	scored := &chatLogprobs{Content: []sampledLogprob{}}
	for _, t := range tokens {
		sampled := sampledLogprob{tokenLogprob: logprobOf(t, asID), TopLogprobs: []tokenLogprob{}}
		for _, top := range t.Top {
			sampled.TopLogprobs = append(sampled.TopLogprobs, logprobOf(top, asID))
		}
		scored.Content = append(scored.Content, sampled)
	}
	return scored
}

// Whole implements edge.Writer.
func (f *chatWriter) Whole(a *edge.Answer, all []*edge.Completion) (any, error) {
	out := f.envelope(a)
	out.Object, out.Usage = "chat.completion", usageOf(a.Usage)
	for _, c := range all {
		f.called[c.Index] = len(c.Message.Calls) > 0
		message := &wholeText{chatText: f.text(c.Message, false)}
		message.Role = "assistant"
		if message.Content = &c.Message.Content; c.Message.Content == "" && f.called[c.Index] {
			message.Content = nil
		}
		out.Choices = append(out.Choices, chatChoice{
			Index: c.Index, Message: message, Logprobs: f.score(c.Tokens), FinishReason: f.reason(c), extras: extrasOf(c, f.body.ReturnTokenIDs),
		})
		if prompt := f.prompt(c); len(prompt.PromptTokenIDs) > 0 || len(prompt.PromptLogprobs) > 0 {
			out.promptParts = prompt
		}
	}
	return out, nil
}

// Piece implements edge.Writer.
func (f *chatWriter) Piece(s *edge.Stream, a *edge.Answer, piece *edge.Completion) error {
	if !f.opened[piece.Index] {
		f.opened[piece.Index] = true
		first := chatChoice{Index: piece.Index, Delta: &chatText{Role: "assistant", Content: edge.Ptr("")}}
		if err := f.send(s, a, first, promptParts{}); err != nil {
			return err
		}
	}
	said := piece.Message
	f.called[piece.Index] = f.called[piece.Index] || len(said.Calls) > 0
	tokens := len(piece.Tokens) > 0 && (f.body.Logprobs || f.body.ReturnTokenIDs)
	if said.Content == "" && said.Reasoning == "" && len(said.Calls) == 0 && piece.Finish == "" && !tokens {
		return nil
	}
	delta := f.text(said, true)
	if said.Content != "" {
		delta.Content = &said.Content
	}
	choice := chatChoice{Index: piece.Index, Delta: &delta, FinishReason: f.reason(piece), extras: extrasOf(piece, f.body.ReturnTokenIDs)}
	if len(piece.Tokens) > 0 {
		choice.Logprobs = f.score(piece.Tokens)
	}
	return f.send(s, a, &choice, f.prompt(piece))
}

// text converts what the policy said, without the content.
func (f *chatWriter) text(m edge.Message, stream bool) chatText {
	out := chatText{ReasoningContent: m.Reasoning}
	for _, call := range m.Calls {
		said := functionCall{Name: call.Name, Arguments: call.Arguments}
		if len(f.body.Functions) > 0 { // the older form has one call
			if call.Index == 0 {
				out.FunctionCall = &said
			}
			continue
		}
		converted := toolCall{ID: call.ID, Function: said}
		if stream {
			converted.Index = edge.Ptr(call.Index)
		}
		if call.Name != "" {
			converted.Type = "function"
		}
		out.ToolCalls = append(out.ToolCalls, converted)
	}
	return out
}

// reason returns the finish reason: that of a message with calls is that it calls.
func (f *chatWriter) reason(c *edge.Completion) *string {
	switch {
	case c.Finish != "stop" || !f.called[c.Index]:
		return reason(c.Finish)
	case len(f.body.Functions) > 0:
		return edge.Ptr("function_call")
	}
	return edge.Ptr("tool_calls")
}

func (f *chatWriter) score(tokens []edge.Token) *chatLogprobs {
	if !f.body.Logprobs {
		return nil
	}
	return ChatLogprobs(tokens, f.body.TokensAsTokenIDs)
}

// prompt returns what the request asked for about the prompt, which the last piece has.
func (f *chatWriter) prompt(c *edge.Completion) (parts promptParts) {
	if f.body.ReturnTokenIDs {
		parts.PromptTokenIDs = c.Prompt.IDs
	}
	if f.body.PromptLogprobs != nil && len(c.Prompt.Tokens) > 0 {
		parts.PromptLogprobs = PromptByID(c.Prompt)
	}
	return parts
}
