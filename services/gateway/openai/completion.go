package openai

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

type completionRequest struct {
	common
	Prompt json.RawMessage `json:"prompt"`
	// Of vLLM.
	AddSpecialTokens *bool         `json:"add_special_tokens"`
	Echo             bool          `json:"echo"`
	Suffix           *string       `json:"suffix"`
	BestOf           *edge.Integer `json:"best_of"`
	Logprobs         *edge.Integer `json:"logprobs"`
}

func (h *handler) completions(w http.ResponseWriter, r *http.Request) error {
	var body completionRequest
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	if err := body.check(); err != nil {
		return err
	}
	top, err := edge.Top("logprobs", body.Logprobs)
	if err != nil {
		return err
	}
	prompts, err := Prompts("prompt", body.Prompt)
	if err != nil {
		return err
	}
	for _, p := range prompts {
		p.NoSpecialTokens = p.GetTokens() == nil && body.AddSpecialTokens != nil && !*body.AddSpecialTokens
	}
	req, err := body.request(r)
	if err != nil {
		return err
	}
	req.Prompts, req.Params.TopLogprobs, req.TokenBytes = prompts, top, body.Logprobs != nil
	writer := &textWriter{
		chunks: chunks{prefix: "cmpl-", object: "text_completion", options: body.StreamOptions},
		body:   &body, prompts: prompts, n: req.GetN(), state: map[uint32]*textState{},
	}
	if body.Echo && (body.Logprobs != nil || prompts[0].GetTokens() != nil) {
		writer.wait, req.PromptLogprobs = true, true
		req.PromptTopLogprobs = max(req.GetPromptTopLogprobs(), top)
	}
	return h.Complete(w, r, req, body.Stream, writer, "prompt")
}

// check checks the fields that only completions have.
func (b *completionRequest) check() error {
	switch {
	case b.Suffix != nil && *b.Suffix != "":
		return edge.Unsupported("suffix", "a completion continues from the end of the prompt")
	case b.BestOf != nil && (b.N == nil && *b.BestOf != 1 || b.N != nil && *b.BestOf != *b.N):
		return edge.Unsupported("best_of", "request `n` completions and choose one yourself")
	case b.MaxTokens != nil && *b.MaxTokens == 0 && !b.Echo && b.PromptLogprobs == nil:
		return edge.Invalid("max_tokens", "`max_tokens` must be at least 1, or 0 with `echo` or `prompt_logprobs`")
	}
	return nil
}

// Prompts reads a string, a list of strings, a list of token ids, or a list of lists of token ids.
func Prompts(param string, raw json.RawMessage) ([]*inferencev1.Prompt, error) {
	var text string
	var texts []string
	var tokens []uint32
	var lists [][]uint32
	var out []*inferencev1.Prompt
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, edge.Missing(param, "`%s` is missing", param)
	case json.Unmarshal(raw, &text) == nil:
		texts = []string{text}
	case json.Unmarshal(raw, &texts) == nil:
	case json.Unmarshal(raw, &tokens) == nil:
		texts, lists = nil, [][]uint32{tokens}
	case json.Unmarshal(raw, &lists) == nil:
		texts = nil
	default:
		return nil, edge.Invalid(param, "`%s` must be a string, a list of strings, a list of token ids, or a list of lists of token ids", param)
	}
	for _, t := range texts {
		out = append(out, &inferencev1.Prompt{Kind: &inferencev1.Prompt_Text{Text: t}})
	}
	for _, ids := range lists {
		if len(ids) == 0 {
			return nil, edge.Invalid(param, "`%s` must not have an empty list of token ids", param)
		}
		out = append(out, &inferencev1.Prompt{Kind: &inferencev1.Prompt_Tokens{Tokens: &inferencev1.TokenIds{Ids: ids}}})
	}
	if len(out) == 0 || len(out) > edge.MaxPrompts {
		return nil, edge.Invalid(param, "`%s` must have between 1 and %d prompts, got %d", param, edge.MaxPrompts, len(out))
	}
	return out, nil
}

// textWriter writes completions as text completions.
type textWriter struct {
	chunks
	body    *completionRequest
	prompts []*inferencev1.Prompt
	n       uint32 // completions per prompt
	wait    bool   // the echo needs the tokens of the prompt, which the last piece has
	state   map[uint32]*textState
}

// textState is a choice of a stream.
type textState struct {
	echoed bool
	offset int // characters that were sent
	held   []*edge.Completion
}

type textChoice struct {
	Index          uint32           `json:"index"`
	Text           string           `json:"text"`
	Logprobs       *textLogprobs    `json:"logprobs"`
	FinishReason   *string          `json:"finish_reason"`
	PromptLogprobs []map[string]any `json:"prompt_logprobs,omitempty"`
	PromptTokenIDs []uint32         `json:"prompt_token_ids,omitempty"`
	extras
}

type textLogprobs struct {
	Tokens        []string             `json:"tokens"`
	TokenLogprobs []*float32           `json:"token_logprobs"`
	TopLogprobs   []map[string]float32 `json:"top_logprobs"`
	TextOffset    []int                `json:"text_offset"`
}

// choice writes a completion, or a piece of it. offset is the characters before it.
func (f *textWriter) choice(c *edge.Completion, offset int) (textChoice, int) {
	out := textChoice{Index: c.Index, Text: c.Text, FinishReason: reason(c.Finish), extras: extrasOf(c, f.body.ReturnTokenIDs)}
	if f.body.PromptLogprobs != nil && len(c.Prompt.Tokens) > 0 {
		out.PromptLogprobs = PromptByID(c.Prompt)
	}
	if f.body.ReturnTokenIDs {
		out.PromptTokenIDs = c.Prompt.IDs
	}
	if f.body.Logprobs == nil {
		return out, offset
	}
	out.Logprobs, offset = f.score(nil, c.Tokens, offset, false)
	return out, offset
}

// echo returns the prompt of a completion as a text.
func (f *textWriter) echo(c *edge.Completion) string {
	if prompt := f.prompts[c.Index/f.n]; prompt.GetTokens() == nil {
		return prompt.GetText()
	}
	var text strings.Builder
	for _, t := range c.Prompt.Tokens {
		text.Write(t.Bytes)
	}
	return text.String()
}

// Whole implements edge.Writer.
func (f *textWriter) Whole(a *edge.Answer, all []*edge.Completion) (any, error) {
	out := f.envelope(a)
	out.Usage = usageOf(a.Usage)
	for _, c := range all {
		choice, _ := f.choice(c, 0)
		if f.body.Echo {
			choice.Text = f.echo(c) + choice.Text
			if f.body.Logprobs != nil {
				scored, offset := f.score(nil, c.Prompt.Tokens, 0, true)
				choice.Logprobs, _ = f.score(scored, c.Tokens, offset, false)
			}
		}
		out.Choices = append(out.Choices, choice)
	}
	return out, nil
}

// Piece implements edge.Writer. An echo with logprobs begins the stream of its choice, so the
// choice is sent when the worker has sent the logprobs of the prompt, with the last piece.
func (f *textWriter) Piece(s *edge.Stream, a *edge.Answer, piece *edge.Completion) error {
	state := f.state[piece.Index]
	if state == nil {
		state = &textState{echoed: !f.body.Echo}
		f.state[piece.Index] = state
	}
	state.held = append(state.held, piece)
	if !state.echoed {
		if f.wait && piece.Finish == "" {
			return nil
		}
		state.echoed = true
		first := textChoice{Index: piece.Index, Text: f.echo(piece)}
		if f.body.Logprobs != nil {
			first.Logprobs, state.offset = f.score(nil, piece.Prompt.Tokens, 0, true)
		}
		if err := f.send(s, a, first, promptParts{}); err != nil {
			return err
		}
	}
	held := state.held
	state.held = nil
	for _, p := range held {
		tokens := len(p.Tokens) > 0 && (f.body.Logprobs != nil || f.body.ReturnTokenIDs)
		if p.Text == "" && p.Finish == "" && !tokens {
			continue
		}
		var choice textChoice
		choice, state.offset = f.choice(p, state.offset)
		if err := f.send(s, a, choice, promptParts{}); err != nil {
			return err
		}
	}
	return nil
}

// score appends the logprobs of tokens and returns the characters after them. The first token of a
// prompt has no logprob.
func (f *textWriter) score(l *textLogprobs, tokens []edge.Token, offset int, prompt bool) (*textLogprobs, int) {
	if l == nil { // empty lists instead of null, as OpenAI's clients expect
		l = &textLogprobs{Tokens: []string{}, TokenLogprobs: []*float32{}, TopLogprobs: []map[string]float32{}, TextOffset: []int{}}
	}
	for i, t := range tokens {
		var logprob *float32
		var top map[string]float32
		if !prompt || i > 0 {
			logprob, top = edge.Ptr(edge.Finite(t.Logprob)), f.top(t)
		}
		l.Tokens, l.TokenLogprobs = append(l.Tokens, t.Label(f.body.TokensAsTokenIDs)), append(l.TokenLogprobs, logprob)
		l.TopLogprobs, l.TextOffset = append(l.TopLogprobs, top), append(l.TextOffset, offset)
		for _, c := range t.Bytes {
			if c&0xC0 != 0x80 { // the first byte of a character
				offset++
			}
		}
	}
	return l, offset
}

// top returns the most likely tokens by their text, with the token itself; nil if none were
// requested. Of tokens with the same text, the most likely one counts.
func (f *textWriter) top(t edge.Token) map[string]float32 {
	if len(t.Top) == 0 {
		return nil
	}
	out := map[string]float32{}
	most := min(len(t.Top), int(*f.body.Logprobs)) // prompt_logprobs may have requested more
	for _, top := range append(t.Top[:most:most], t) {
		label := top.Label(f.body.TokensAsTokenIDs)
		if _, ok := out[label]; !ok {
			out[label] = edge.Finite(top.Logprob)
		}
	}
	return out
}

func idOf(t edge.Token) string { return strconv.FormatUint(uint64(t.ID), 10) }
