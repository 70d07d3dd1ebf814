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
	BestOf   *integer        `json:"best_of"`
	Logprobs *integer        `json:"logprobs"`
	// Of vLLM.
	PromptLogprobs *integer `json:"prompt_logprobs"`
}

func (h *handler) completions(w http.ResponseWriter, r *http.Request) error {
	var body completionRequest
	if err := decode(r, &body); err != nil {
		return err
	}
	switch {
	case body.Echo && body.Stream:
		return unsupported("echo", "a stream does not include the prompt; omit `stream`, or prepend the prompt yourself")
	case body.PromptLogprobs != nil && body.Stream:
		return unsupported("prompt_logprobs", "a stream does not include the prompt; omit `stream`")
	case body.PromptLogprobs != nil && *body.PromptLogprobs < 0:
		return invalid("prompt_logprobs", "`prompt_logprobs` must be at least 0, got %d", *body.PromptLogprobs)
	case body.Suffix != nil && *body.Suffix != "":
		return unsupported("suffix", "a completion continues from the end of the prompt")
	case body.BestOf != nil && (body.N == nil && *body.BestOf != 1 || body.N != nil && *body.BestOf != *body.N):
		return unsupported("best_of", "request `n` completions and choose one yourself")
	case body.Logprobs != nil && *body.Logprobs < 0:
		return invalid("logprobs", "`logprobs` must be at least 0, got %d", *body.Logprobs)
	case body.Logprobs != nil && *body.Logprobs > 1:
		return unsupported("logprobs", "only the logprobs of sampled tokens are recorded; send `logprobs: 1`")
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
	format := textFormat{
		logprobs: body.Logprobs != nil, echo: body.Echo, promptLogprobs: body.PromptLogprobs != nil, n: req.GetN(), offsets: map[uint32]int{},
	}
	for _, p := range prompts {
		format.prompts = append(format.prompts, p.GetText())
	}
	req.PromptLogprobs = format.echo || format.promptLogprobs
	return h.answer(w, r, req, format, body.sampling, "prompt")
}

// prompts reads a string, a list of strings, a list of token ids, or a list of lists of token ids.
func prompts(raw json.RawMessage) ([]*inferencev1.Prompt, error) {
	var text string
	var texts []string
	var tokens []uint32
	var lists [][]uint32
	var out []*inferencev1.Prompt
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: "prompt", Code: "missing_required_parameter", Message: "`prompt` is missing"}
	case json.Unmarshal(raw, &text) == nil:
		texts = []string{text}
	case json.Unmarshal(raw, &texts) == nil:
	case json.Unmarshal(raw, &tokens) == nil:
		texts, lists = nil, [][]uint32{tokens}
	case json.Unmarshal(raw, &lists) == nil:
		texts = nil
	default:
		return nil, invalid("prompt", "`prompt` must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
	}
	for _, t := range texts {
		out = append(out, &inferencev1.Prompt{Kind: &inferencev1.Prompt_Text{Text: t}})
	}
	for _, ids := range lists {
		if len(ids) == 0 {
			return nil, invalid("prompt", "`prompt` must not have an empty list of token ids")
		}
		out = append(out, &inferencev1.Prompt{Kind: &inferencev1.Prompt_Tokens{Tokens: &inferencev1.TokenIds{Ids: ids}}})
	}
	if len(out) == 0 || len(out) > 256 {
		return nil, invalid("prompt", "`prompt` must have between 1 and 256 prompts, got %d", len(out))
	}
	return out, nil
}

// textFormat writes completions as text completions.
type textFormat struct {
	logprobs       bool
	echo           bool           // the text includes the prompt
	promptLogprobs bool           // the choice includes the logprobs of the prompt, as in vLLM
	prompts        []string       // "" for prompts that are token ids
	n              uint32         // completions per prompt
	offsets        map[uint32]int // characters of each choice that a stream has sent
}

func (textFormat) id() string { return "cmpl-" }

func (textFormat) object(bool) string { return "text_completion" }

type textChoice struct {
	Index          uint32                     `json:"index"`
	Text           string                     `json:"text"`
	Logprobs       *textLogprobs              `json:"logprobs"`
	FinishReason   *string                    `json:"finish_reason"`
	PromptLogprobs []map[string]promptLogprob `json:"prompt_logprobs,omitempty"`
}

type textLogprobs struct {
	Tokens        []string   `json:"tokens"`
	TokenLogprobs []*float32 `json:"token_logprobs"`
	TopLogprobs   []any      `json:"top_logprobs"`
	TextOffset    []int      `json:"text_offset"`
	begin         int        // offset of the first token
}

// promptLogprob describes a token of a prompt, as in vLLM.
type promptLogprob struct {
	Logprob float32 `json:"logprob"`
	Text    string  `json:"decoded_token"`
}

func (f textFormat) choice(c *completion) any {
	choice := textChoice{Index: c.index, Text: c.text(), FinishReason: reason(c.finish)}
	scored := noLogprobs()
	if f.echo {
		before := f.prompts[c.index/f.n]
		if before == "" {
			before = strings.Join(c.prompt.texts, "")
		}
		choice.Text = before + choice.Text
		scored.prompt(c.prompt)
	}
	if f.promptLogprobs {
		choice.PromptLogprobs = c.prompt.byID()
	}
	if f.logprobs {
		scored.add(c.pieces)
		choice.Logprobs = scored
	}
	return choice
}

func (textFormat) first(uint32) any { return nil }

func (f textFormat) chunk(index uint32, p piece) any {
	choice := textChoice{Index: index, Text: p.text, FinishReason: reason(p.finish)}
	if f.logprobs {
		choice.Logprobs = noLogprobs()
		choice.Logprobs.begin = f.offsets[index]
		choice.Logprobs.add([]piece{p})
		f.offsets[index] += utf8.RuneCountInString(p.text)
	}
	return choice
}

// noLogprobs has empty lists instead of null, as OpenAI's clients expect.
func noLogprobs() *textLogprobs {
	return &textLogprobs{Tokens: []string{}, TokenLogprobs: []*float32{}, TopLogprobs: []any{}, TextOffset: []int{}}
}

// prompt adds the tokens of a prompt. The first has no logprob.
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

// byID returns each token of the prompt by its id; null for the first.
func (p prompt) byID() []map[string]promptLogprob {
	out := make([]map[string]promptLogprob, len(p.texts))
	for i, text := range p.texts {
		if i > 0 {
			out[i] = map[string]promptLogprob{strconv.FormatUint(uint64(p.ids[i]), 10): {finite(p.logprobs[i]), text}}
		}
	}
	return out
}

// reason returns the finish reason of OpenAI.
func reason(finish string) *string {
	if finish == "" {
		return nil
	}
	if finish == "abort" {
		finish = "stop"
	}
	return &finish
}

// finite replaces values that JSON does not have. OpenAI writes -9999 for a token that can't be
// sampled.
func finite(logprob float32) float32 {
	if math.IsInf(float64(logprob), 0) || math.IsNaN(float64(logprob)) {
		return -9999
	}
	return logprob
}
