package openai

import (
	"encoding/json"
	"math"
	"net/http"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

type completionRequest struct {
	sampling
	Prompt   json.RawMessage `json:"prompt"`
	Echo     bool            `json:"echo"`
	Suffix   *string         `json:"suffix"`
	BestOf   *int64          `json:"best_of"`
	Logprobs *int64          `json:"logprobs"`
}

func (h *handler) completions(w http.ResponseWriter, r *http.Request) error {
	var body completionRequest
	if err := decode(r, &body); err != nil {
		return err
	}
	switch {
	case body.Echo:
		return unsupported("echo", "prepend the prompt yourself")
	case body.Suffix != nil && *body.Suffix != "":
		return unsupported("suffix", "completions go on from the prompt's end")
	case body.BestOf != nil && (body.N == nil && *body.BestOf != 1 || body.N != nil && *body.BestOf != *body.N):
		return unsupported("best_of", "ask for `n` completions and choose yourself")
	case body.Logprobs != nil && *body.Logprobs < 0:
		return invalid("logprobs", "`logprobs` must be at least 0, it is %d", *body.Logprobs)
	}
	prompts, err := prompts(body.Prompt)
	if err != nil {
		return err
	}
	req, err := body.request(r)
	if err != nil {
		return err
	}
	req.Prompts = prompts
	return h.answer(w, r, req, textForm{logprobs: body.Logprobs != nil}, body.sampling, "prompt")
}

// prompts reads a text, a list of texts, a list of token ids, or a list of such lists.
func prompts(raw json.RawMessage) ([]*inferencev1.Prompt, error) {
	var text string
	var texts []string
	var tokens []uint32
	var lists [][]uint32
	var out []*inferencev1.Prompt
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: "prompt", Code: "missing_required_parameter", Message: "you must provide a `prompt`"}
	case json.Unmarshal(raw, &text) == nil:
		texts = []string{text}
	case json.Unmarshal(raw, &texts) == nil:
	case json.Unmarshal(raw, &tokens) == nil:
		texts, lists = nil, [][]uint32{tokens}
	case json.Unmarshal(raw, &lists) == nil:
		texts = nil
	default:
		return nil, invalid("prompt", "`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists")
	}
	for _, t := range texts {
		out = append(out, &inferencev1.Prompt{Kind: &inferencev1.Prompt_Text{Text: t}})
	}
	for _, ids := range lists {
		if len(ids) == 0 {
			return nil, invalid("prompt", "`prompt` holds an empty list of token ids")
		}
		out = append(out, &inferencev1.Prompt{Kind: &inferencev1.Prompt_Tokens{Tokens: &inferencev1.TokenIds{Ids: ids}}})
	}
	if len(out) == 0 || len(out) > 256 {
		return nil, invalid("prompt", "`prompt` holds %d prompts; between 1 and 256 are taken", len(out))
	}
	return out, nil
}

// textForm renders answers as completions.
type textForm struct{ logprobs bool }

func (textForm) id() string { return "cmpl-" }

func (textForm) object(bool) string { return "text_completion" }

type textChoice struct {
	Index        uint32        `json:"index"`
	Text         string        `json:"text"`
	Logprobs     *textLogprobs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
}

type textLogprobs struct {
	Tokens        []string  `json:"tokens"`
	TokenLogprobs []float32 `json:"token_logprobs"`
	TopLogprobs   []any     `json:"top_logprobs"`
	TextOffset    []int     `json:"text_offset"`
}

func (f textForm) whole(c *completion) any {
	return textChoice{Index: c.index, Text: c.text(), Logprobs: f.score(c.pieces), FinishReason: reason(c.finish)}
}

func (textForm) open(uint32) any { return nil }

func (f textForm) piece(index uint32, p piece) any {
	return textChoice{Index: index, Text: p.text, Logprobs: f.score([]piece{p}), FinishReason: reason(p.finish)}
}

func (f textForm) score(pieces []piece) *textLogprobs {
	if !f.logprobs {
		return nil
	}
	scored := &textLogprobs{Tokens: []string{}, TokenLogprobs: []float32{}, TopLogprobs: []any{}, TextOffset: []int{}}
	offset := 0
	for _, p := range pieces {
		for i, logprob := range p.logprobs {
			token := p.token(i)
			scored.Tokens = append(scored.Tokens, token)
			scored.TokenLogprobs = append(scored.TokenLogprobs, finite(logprob))
			scored.TopLogprobs = append(scored.TopLogprobs, nil)
			scored.TextOffset = append(scored.TextOffset, offset)
			offset += len([]rune(token))
		}
	}
	return scored
}

// reason is OpenAI's word for how a completion ended.
func reason(finish string) *string {
	if finish == "" {
		return nil
	}
	if finish == "abort" {
		finish = "stop"
	}
	return &finish
}

// finite keeps JSON possible: OpenAI writes -9999 for what can't be sampled.
func finite(logprob float32) float32 {
	if math.IsInf(float64(logprob), 0) || math.IsNaN(float64(logprob)) {
		return -9999
	}
	return logprob
}
