package openai

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

type completionRequest struct {
	sampling
	Prompt   json.RawMessage `json:"prompt"`
	Echo     bool            `json:"echo"`
	Suffix   *string         `json:"suffix"`
	BestOf   *whole          `json:"best_of"`
	Logprobs *whole          `json:"logprobs"`
	// vLLM's.
	PromptLogprobs *whole `json:"prompt_logprobs"`
}

func (h *handler) completions(w http.ResponseWriter, r *http.Request) error {
	var body completionRequest
	if err := decode(r, &body); err != nil {
		return err
	}
	switch {
	case body.Echo && body.Stream:
		return unsupported("echo", "a stream does not tell its prompt; ask for a whole answer, or prepend the prompt yourself")
	case body.PromptLogprobs != nil && body.Stream:
		return unsupported("prompt_logprobs", "a stream does not tell its prompt; ask for a whole answer")
	case body.PromptLogprobs != nil && *body.PromptLogprobs < 0:
		return invalid("prompt_logprobs", "`prompt_logprobs` must be at least 0, it is %d", *body.PromptLogprobs)
	case body.Suffix != nil && *body.Suffix != "":
		return unsupported("suffix", "completions go on from the prompt's end")
	case body.BestOf != nil && (body.N == nil && *body.BestOf != 1 || body.N != nil && *body.BestOf != *body.N):
		return unsupported("best_of", "ask for `n` completions and choose yourself")
	case body.Logprobs != nil && *body.Logprobs < 0:
		return invalid("logprobs", "`logprobs` must be at least 0, it is %d", *body.Logprobs)
	case body.Logprobs != nil && *body.Logprobs > 1:
		return unsupported("logprobs", "logprobs of the sampled tokens alone are kept; send `logprobs: 1`")
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
	form := textForm{logprobs: body.Logprobs != nil, echo: body.Echo, prompts: body.PromptLogprobs != nil, n: req.GetN(), said: map[uint32]int{}}
	for _, p := range prompts {
		form.texts = append(form.texts, p.GetText())
	}
	req.PromptLogprobs = form.echo || form.prompts
	return h.answer(w, r, req, form, body.sampling, "prompt")
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
type textForm struct {
	logprobs bool
	echo     bool           // the prompt stands before the completion
	prompts  bool           // the prompt's logprobs stand beside it, as vLLM tells them
	texts    []string       // prompts, where they were sent as texts
	n        uint32         // completions a prompt
	said     map[uint32]int // characters that a stream has told of each choice
}

func (textForm) id() string { return "cmpl-" }

func (textForm) object(bool) string { return "text_completion" }

type textChoice struct {
	Index          uint32             `json:"index"`
	Text           string             `json:"text"`
	Logprobs       *textLogprobs      `json:"logprobs"`
	FinishReason   *string            `json:"finish_reason"`
	PromptLogprobs []map[string]known `json:"prompt_logprobs,omitempty"`
}

type textLogprobs struct {
	Tokens        []string   `json:"tokens"`
	TokenLogprobs []*float32 `json:"token_logprobs"`
	TopLogprobs   []any      `json:"top_logprobs"`
	TextOffset    []int      `json:"text_offset"`
	begin         int        // offset of the first token
}

// known is what vLLM tells of a token.
type known struct {
	Logprob float32 `json:"logprob"`
	Text    string  `json:"decoded_token"`
}

func (f textForm) whole(c *completion) any {
	choice := textChoice{Index: c.index, Text: c.text(), FinishReason: reason(c.finish)}
	scored := noLogprobs()
	if f.echo {
		before := f.texts[c.index/f.n]
		if before == "" {
			before = strings.Join(c.prompt.texts, "")
		}
		choice.Text = before + choice.Text
		scored.prompt(c.prompt)
	}
	if f.prompts {
		choice.PromptLogprobs = c.prompt.byID()
	}
	if f.logprobs {
		scored.add(c.pieces)
		choice.Logprobs = scored
	}
	return choice
}

func (textForm) open(uint32) any { return nil }

func (f textForm) piece(index uint32, p piece) any {
	choice := textChoice{Index: index, Text: p.text, FinishReason: reason(p.finish)}
	if f.logprobs {
		choice.Logprobs = noLogprobs()
		choice.Logprobs.begin = f.said[index]
		choice.Logprobs.add([]piece{p})
		f.said[index] += utf8.RuneCountInString(p.text)
	}
	return choice
}

// noLogprobs is empty lists, which OpenAI's clients want where there is nothing.
func noLogprobs() *textLogprobs {
	return &textLogprobs{Tokens: []string{}, TokenLogprobs: []*float32{}, TopLogprobs: []any{}, TextOffset: []int{}}
}

// prompt puts the prompt's tokens there. The first follows nothing, and has no logprob.
func (l *textLogprobs) prompt(p prompt) {
	for i, text := range p.texts {
		var logprob *float32
		if i > 0 {
			logprob = ptr(finite(p.logprobs[i]))
		}
		l.token(text, logprob)
	}
}

func (l *textLogprobs) add(pieces []piece) {
	for _, p := range pieces {
		for i, logprob := range p.logprobs {
			l.token(p.token(i), ptr(finite(logprob)))
		}
	}
}

func (l *textLogprobs) token(text string, logprob *float32) {
	offset := l.begin
	if last := len(l.Tokens) - 1; last >= 0 {
		offset = l.TextOffset[last] + len([]rune(l.Tokens[last]))
	}
	l.Tokens, l.TokenLogprobs = append(l.Tokens, text), append(l.TokenLogprobs, logprob)
	l.TopLogprobs, l.TextOffset = append(l.TopLogprobs, nil), append(l.TextOffset, offset)
}

// byID is each token of the prompt by its id; null for the first.
func (p prompt) byID() []map[string]known {
	out := make([]map[string]known, len(p.texts))
	for i, text := range p.texts {
		if i > 0 {
			out[i] = map[string]known{strconv.FormatUint(uint64(p.ids[i]), 10): {finite(p.logprobs[i]), text}}
		}
	}
	return out
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
