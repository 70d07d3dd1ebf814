// Package sglang is the dialect of SGLang's /generate: texts or token ids in, texts and token ids
// out, with logprobs, one prompt or a batch, whole or streamed.
//
// The logprobs of sampled tokens are those of the distribution they were sampled from; those of the
// prompt and of the most likely tokens are of the unmodified softmax. As in SGLang, each event of a
// stream has everything so far.
package sglang

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
	"github.com/rollout-rl/rollout/services/gateway/openai"
)

// Routes are the endpoints of the dialect.
func Routes(e *edge.Edge) []edge.Route {
	h := &handler{e}
	route := edge.Route{
		Method: http.MethodPost, Path: "/generate", Tag: "SGLang", About: "Complete texts or token ids.", Request: request{}, Serve: h.generate,
		Body: edge.PlainBody, Session: true,
	}
	put := route
	put.Method = http.MethodPut
	return []edge.Route{route, put}
}

type handler struct{ *edge.Edge }

type request struct {
	edge.Target
	RID                  json.RawMessage `json:"rid"`
	Text                 json.RawMessage `json:"text"`
	InputIDs             json.RawMessage `json:"input_ids"`
	InputEmbeds          json.RawMessage `json:"input_embeds"`
	ImageData            json.RawMessage `json:"image_data"`
	VideoData            json.RawMessage `json:"video_data"`
	AudioData            json.RawMessage `json:"audio_data"`
	SamplingParams       json.RawMessage `json:"sampling_params"`
	ReturnLogprob        json.RawMessage `json:"return_logprob"`
	LogprobStartLen      json.RawMessage `json:"logprob_start_len"`
	TopLogprobsNum       json.RawMessage `json:"top_logprobs_num"`
	TokenIDsLogprob      json.RawMessage `json:"token_ids_logprob"`
	ReturnTextInLogprobs bool            `json:"return_text_in_logprobs"`
	ReturnHiddenStates   json.RawMessage `json:"return_hidden_states"`
	CustomLogitProcessor json.RawMessage `json:"custom_logit_processor"`
	LoraPath             json.RawMessage `json:"lora_path"`
	SessionParams        json.RawMessage `json:"session_params"`
	Stream               bool            `json:"stream"`
}

// sampling is the sampling_params of SGLang.
type sampling struct {
	edge.Sampling
	MaxNewTokens  *edge.Integer   `json:"max_new_tokens"`
	MinNewTokens  *edge.Integer   `json:"min_new_tokens"`
	SamplingSeed  *edge.Integer   `json:"sampling_seed"`
	N             *edge.Integer   `json:"n"`
	JSONSchema    json.RawMessage `json:"json_schema"`
	Regex         string          `json:"regex"`
	EBNF          string          `json:"ebnf"`
	StructuralTag json.RawMessage `json:"structural_tag"`
	StopRegex     json.RawMessage `json:"stop_regex"`
	NoStopTrim    bool            `json:"no_stop_trim"`
}

// names of the fields of SGLang that have another name in package edge.
var names = map[string]string{
	"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed", "guided_json": "json_schema", "guided_regex": "regex",
	"guided_grammar": "ebnf",
}

func (h *handler) generate(w http.ResponseWriter, r *http.Request) error {
	var body request
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	if err := body.check(); err != nil {
		return err
	}
	prompts, batch, param, err := body.prompts()
	if err != nil {
		return err
	}
	req, err := body.Request(r)
	if err != nil {
		return err
	}
	req.Prompts = prompts
	given, err := body.sampling(len(prompts))
	if err != nil {
		return err
	}
	if req.Params, err = given.params(); err != nil {
		return edge.Rename(err, names)
	}
	if req.N, err = edge.Completions(given.N); err != nil {
		return err
	}
	out := &writer{text: body.ReturnTextInLogprobs, list: batch || req.GetN() > 1, state: map[uint32]*edge.Assembly{}}
	if out.ids, err = ids(body.RID, len(prompts)); err != nil {
		return err
	}
	if out.n = req.GetN(); out.n == 0 {
		out.n = 1
	}
	if out.logprobs, err = same[bool]("return_logprob", body.ReturnLogprob, len(prompts)); err != nil {
		return err
	}
	start, err := same[*edge.Integer]("logprob_start_len", body.LogprobStartLen, len(prompts))
	if err != nil {
		return err
	}
	if err := edge.AtLeast("logprob_start_len", start, -1); err != nil {
		return err
	}
	top, err := same[*edge.Integer]("top_logprobs_num", body.TopLogprobsNum, len(prompts))
	if err != nil {
		return err
	}
	if out.top, err = edge.Top("top_logprobs_num", top); err != nil {
		return err
	}
	out.start = -1
	if out.logprobs && start != nil && *start >= 0 {
		out.start = int(*start)
		req.PromptLogprobs, req.PromptTopLogprobs = true, out.top
	}
	if out.logprobs {
		req.Params.TopLogprobs, req.TokenBytes = out.top, out.text
	}
	if req.Params.MaxTokens != nil && req.GetParams().GetMaxTokens() == 0 && !req.GetPromptLogprobs() {
		return edge.Invalid("max_new_tokens", "`max_new_tokens` must be at least 1, or 0 with `return_logprob` and `logprob_start_len`")
	}
	return h.Complete(w, r, req, body.Stream, out, param)
}

// check refuses what would change the completion and is not supported.
func (b *request) check() error {
	for _, field := range []struct {
		name, why string
		value     json.RawMessage
	}{
		{"input_embeds", "send `text` or `input_ids`", b.InputEmbeds},
		{"token_ids_logprob", "only the sampled and the most likely tokens have logprobs; send `top_logprobs_num`", b.TokenIDsLogprob},
		{"return_hidden_states", "engines return tokens alone", b.ReturnHiddenStates},
		{"custom_logit_processor", "send `logit_bias`, `json_schema`, `regex`, or `ebnf`", b.CustomLogitProcessor},
		{"lora_path", "the weights of the run are served", b.LoraPath},
		{"session_params", "name a session with `session_id`", b.SessionParams},
	} {
		if edge.IsSet(field.value) {
			return edge.Unsupported(field.name, field.why)
		}
	}
	why := "this model reads text; send `text` or `input_ids`"
	switch {
	case media(b.ImageData):
		return edge.Unsupported("image_data", why)
	case media(b.VideoData):
		return edge.Unsupported("video_data", why)
	case media(b.AudioData):
		return edge.Unsupported("audio_data", why)
	}
	return nil
}

// media reports whether there is any item: lists of empty items are none.
func media(raw json.RawMessage) bool {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) == nil {
		return slices.ContainsFunc(list, media)
	}
	return edge.IsSet(raw)
}

// prompts reads text or input_ids. param is the one that was sent.
func (b *request) prompts() (prompts []*inferencev1.Prompt, batch bool, param string, err error) {
	raw := b.Text
	if param = "text"; !edge.IsSet(b.Text) {
		raw, param = b.InputIDs, "input_ids"
	} else if edge.IsSet(b.InputIDs) {
		return nil, false, param, edge.Invalid("input_ids", "`text` and `input_ids` were sent; send one")
	}
	if !edge.IsSet(raw) {
		return nil, false, param, edge.Missing("text", "`text` or `input_ids` is missing")
	}
	prompts, err = openai.Prompts(param, raw)
	var texts []string
	var lists [][]uint32
	batch = json.Unmarshal(raw, &texts) == nil || json.Unmarshal(raw, &lists) == nil
	return prompts, batch, param, err
}

// sampling reads an object, or a list of equal objects.
func (b *request) sampling(prompts int) (*sampling, error) {
	if len(b.SamplingParams) == 0 {
		return &sampling{}, nil
	}
	raw, err := same[json.RawMessage]("sampling_params", b.SamplingParams, prompts)
	if err != nil {
		return nil, err
	}
	given := &sampling{}
	if len(raw) == 0 {
		return given, nil
	}
	return given, edge.Unmarshal(raw, given)
}

// same reads a value, or a list that has the same value for each prompt.
func same[T any](param string, raw json.RawMessage, prompts int) (value T, err error) {
	if len(raw) == 0 {
		return value, nil
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) == nil && list != nil {
		if len(list) != prompts {
			return value, edge.Invalid(param, "`%s` must have one value per prompt, got %d for %d prompts", param, len(list), prompts)
		}
		for _, other := range list {
			if string(other) != string(list[0]) {
				return value, edge.Unsupported(param, "the values of a batch must be the same; send one request per value")
			}
		}
		raw = list[0]
	}
	if json.Unmarshal(raw, &value) != nil {
		return value, edge.Invalid(param, "`%s` has a value of the wrong type: %.40s", param, raw)
	}
	return value, nil
}

// ids reads the request ids of the caller, if it sent any.
func ids(raw json.RawMessage, prompts int) ([]string, error) {
	if !edge.IsSet(raw) {
		return nil, nil
	}
	var one string
	var many []string
	if json.Unmarshal(raw, &one) == nil {
		if prompts == 1 {
			return []string{one}, nil
		}
		for i := range prompts { // as in SGLang
			many = append(many, one+"_"+strconv.Itoa(i))
		}
		return many, nil
	}
	if json.Unmarshal(raw, &many) != nil || len(many) != prompts {
		return nil, edge.Invalid("rid", "`rid` must be a string, or a list of %d strings", prompts)
	}
	return many, nil
}

// params converts the names of SGLang to those of package edge.
func (s *sampling) params() (*inferencev1.SamplingParams, error) {
	switch {
	case edge.IsSet(s.StructuralTag):
		return nil, edge.Unsupported("structural_tag", "send `json_schema`, `regex`, or `ebnf`")
	case edge.IsSet(s.StopRegex):
		return nil, edge.Unsupported("stop_regex", "send `stop`")
	case s.NoStopTrim:
		return nil, edge.Unsupported("no_stop_trim", "the text ends before the stop string")
	}
	for _, renamed := range []struct{ to, from **edge.Integer }{{&s.MaxTokens, &s.MaxNewTokens}, {&s.MinTokens, &s.MinNewTokens}, {&s.Seed, &s.SamplingSeed}} {
		if *renamed.from != nil {
			*renamed.to = *renamed.from
		}
	}
	if s.JSONSchema != nil {
		s.GuidedJSON = s.JSONSchema
	}
	if s.Regex != "" {
		s.GuidedRegex = s.Regex
	}
	if s.EBNF != "" {
		s.GuidedGrammar = s.EBNF
	}
	return s.Params()
}

// writer writes completions as SGLang does.
type writer struct {
	ids      []string // of the caller; nil: none
	n        uint32   // completions per prompt
	list     bool     // whether the response is a list
	logprobs bool
	start    int // first token of the prompt with a logprob; -1: none
	top      uint32
	text     bool // whether logprobs have the texts of their tokens
	state    map[uint32]*edge.Assembly
}

type object = map[string]any

// Whole implements edge.Writer.
func (f *writer) Whole(a *edge.Answer, all []*edge.Completion) (any, error) {
	out := []object{}
	for _, c := range all {
		out = append(out, f.output(a, c))
	}
	if !f.list && len(out) == 1 {
		return out[0], nil
	}
	return out, nil
}

// Piece implements edge.Writer.
func (f *writer) Piece(s *edge.Stream, a *edge.Answer, piece *edge.Completion) error {
	c := f.state[piece.Index]
	if c == nil {
		c = &edge.Assembly{}
		f.state[piece.Index] = c
	}
	c.Add(piece)
	out := f.output(a, c.Whole())
	if f.list {
		out["index"] = piece.Index
	}
	return s.Event("", out)
}

// End implements edge.Writer.
func (*writer) End(s *edge.Stream, _ *edge.Answer) error { return s.Done() }

// Failed implements edge.Writer.
func (*writer) Failed(s *edge.Stream, err *edge.Error) error { return s.Event("", edge.PlainBody(err)) }

func (f *writer) output(a *edge.Answer, c *edge.Completion) object {
	id := a.ID
	if f.ids != nil {
		id = f.ids[c.Index/f.n]
	}
	if f.n > 1 || f.ids == nil && f.list {
		id = fmt.Sprintf("%s_%d", id, c.Index)
	}
	meta := object{
		"id": id, "finish_reason": finish(c), "prompt_tokens": c.Prompt.Count, "completion_tokens": len(c.Tokens), "cached_tokens": c.Cached,
		"session_id": a.Session,
	}
	if a.Version != nil {
		meta["weight_version"] = strconv.FormatUint(*a.Version, 10)
	}
	if c.Versions != nil {
		meta["weight_versions"] = c.Versions
	}
	if f.logprobs {
		f.score(meta, c)
	}
	return object{"text": c.Text, "output_ids": c.IDs(), "meta_info": meta}
}

// finish is why a completion ended; nil if it has not.
func finish(c *edge.Completion) any {
	switch {
	case c.Finish == "":
		return nil
	case c.Finish == "length":
		return object{"type": "length", "length": len(c.Tokens)}
	case c.Finish == "abort":
		return object{"type": "abort", "message": "the request was aborted"}
	case c.StopString != "":
		return object{"type": "stop", "matched": c.StopString}
	case len(c.Tokens) > 0:
		return object{"type": "stop", "matched": c.Tokens[len(c.Tokens)-1].ID}
	}
	return object{"type": "stop", "matched": nil}
}

// score adds lists of [logprob, token id, text or null].
func (f *writer) score(meta object, c *edge.Completion) {
	output, outputTop := []any{}, []any{}
	for _, t := range c.Tokens {
		output, outputTop = append(output, f.scored(t, t.Sampled)), append(outputTop, f.most(t))
	}
	input, inputTop := []any{}, []any{}
	if f.start >= 0 {
		for i, t := range c.Prompt.Tokens[min(f.start, len(c.Prompt.Tokens)):] {
			scored, most := f.scored(t, t.Logprob), f.most(t)
			if i == 0 { // as in SGLang
				scored[0], most = nil, nil
			}
			input, inputTop = append(input, scored), append(inputTop, most)
		}
	}
	meta["output_token_logprobs"], meta["input_token_logprobs"] = output, input
	if f.top > 0 {
		meta["output_top_logprobs"], meta["input_top_logprobs"] = outputTop, inputTop
	}
}

func (f *writer) scored(t edge.Token, logprob float32) []any {
	out := []any{edge.Finite(logprob), t.ID, nil}
	if f.text {
		out[2] = t.Text()
	}
	return out
}

func (f *writer) most(t edge.Token) []any {
	out := []any{}
	for _, top := range t.Top {
		out = append(out, f.scored(top, top.Logprob))
	}
	return out
}
