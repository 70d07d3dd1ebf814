package vllm

import (
	"github.com/rollout-rl/rollout/services/gateway/edge"
	"github.com/rollout-rl/rollout/services/gateway/openai"
)

// writer writes completions as vLLM's token endpoint does. The logprob of a token is that of the
// distribution it was sampled from, and its label is its id: trainers compare both.
type writer struct {
	body  *generateRequest
	given *samplingParams
}

type choice struct {
	Index          uint32         `json:"index"`
	Logprobs       any            `json:"logprobs"`
	FinishReason   *string        `json:"finish_reason"`
	StopReason     string         `json:"stop_reason,omitempty"`
	TokenIDs       []uint32       `json:"token_ids"`
	WeightVersions []edge.Version `json:"weight_versions,omitempty"`
}

type response struct {
	RequestID      string           `json:"request_id"`
	ID             string           `json:"id"`
	Created        int64            `json:"created"`
	Model          string           `json:"model"`
	SessionID      string           `json:"session_id"`
	Choices        []choice         `json:"choices"`
	PromptLogprobs []map[string]any `json:"prompt_logprobs,omitempty"`
	PromptTokenIDs []uint32         `json:"prompt_token_ids,omitempty"`
	Usage          *usage           `json:"usage,omitempty"`
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
}

func usageOf(a *edge.Answer) *usage {
	return &usage{PromptTokens: a.Usage.Prompt, CompletionTokens: a.Usage.Completion, TotalTokens: a.Usage.Prompt + a.Usage.Completion}
}

// response adds the choices of completions, or of pieces of them.
func (f *writer) response(a *edge.Answer, all ...*edge.Completion) response {
	id := f.body.RequestID
	if id == "" {
		id = a.ID
	}
	out := response{RequestID: id, ID: "generate-tokens-" + id, Created: a.Created.Unix(), Model: a.Model, SessionID: a.Session, Choices: []choice{}}
	for _, c := range all {
		one := choice{Index: c.Index, TokenIDs: c.IDs(), StopReason: c.StopString, WeightVersions: c.Versions}
		if c.Finish != "" {
			one.FinishReason = &c.Finish
		}
		if f.given.Logprobs != nil {
			tokens := append([]edge.Token(nil), c.Tokens...)
			for i := range tokens {
				tokens[i].Logprob = tokens[i].Sampled
			}
			one.Logprobs = openai.ChatLogprobs(tokens, true)
		}
		out.Choices = append(out.Choices, one)
		if f.given.PromptLogprobs != nil && len(c.Prompt.Tokens) > 0 {
			out.PromptLogprobs = openai.PromptByID(c.Prompt)
		}
		if f.body.ReturnTokenIDs {
			out.PromptTokenIDs = c.Prompt.IDs
		}
	}
	return out
}

// Whole implements edge.Writer.
func (f *writer) Whole(a *edge.Answer, all []*edge.Completion) (any, error) {
	out := f.response(a, all...)
	out.Usage = usageOf(a)
	return out, nil
}

// Piece implements edge.Writer.
func (f *writer) Piece(s *edge.Stream, a *edge.Answer, piece *edge.Completion) error {
	if len(piece.Tokens) == 0 && piece.Finish == "" {
		return nil
	}
	return s.Event("", f.response(a, piece))
}

// End implements edge.Writer.
func (f *writer) End(s *edge.Stream, a *edge.Answer) error {
	if f.body.StreamOptions != nil && f.body.StreamOptions.IncludeUsage {
		last := f.response(a)
		last.Usage = usageOf(a)
		if err := s.Event("", last); err != nil {
			return err
		}
	}
	return s.Done()
}

// Failed implements edge.Writer.
func (*writer) Failed(s *edge.Stream, err *edge.Error) error { return s.Event("", edge.PlainBody(err)) }
