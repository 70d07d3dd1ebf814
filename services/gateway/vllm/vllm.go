// Package vllm is the dialect of vLLM beyond OpenAI's: /tokenize, /detokenize, and
// /inference/v1/generate (token ids in and out). Its routes that change an engine are not served.
package vllm

import (
	"encoding/json"
	"net/http"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
	"github.com/rollout-rl/rollout/services/gateway/openai"
)

// maxTexts is the number of texts of one call of a worker.
const maxTexts = 1024

// Routes are the endpoints of the dialect.
func Routes(e *edge.Edge) []edge.Route {
	h := &handler{e}
	route := func(path, about string, request any, serve func(w http.ResponseWriter, r *http.Request) error, required ...string) edge.Route {
		return edge.Route{
			Method: http.MethodPost, Path: path, Tag: "vLLM", About: about, Request: request, Required: required, Serve: serve,
			Body: edge.PlainBody, Session: true,
		}
	}
	return []edge.Route{
		route("/tokenize", "Token ids of a text or a chat.", tokenizeRequest{}, h.tokenize),
		route("/detokenize", "Text of token ids.", detokenizeRequest{}, h.detokenize, "tokens"),
		route("/inference/v1/generate", "Complete token ids.", generateRequest{}, h.generate, "token_ids"),
	}
}

type handler struct{ *edge.Edge }

type tokenizeRequest struct {
	edge.Target
	openai.Chat
	Prompt          *string `json:"prompt"`
	ReturnTokenStrs bool    `json:"return_token_strs"`
}

func (h *handler) tokenize(w http.ResponseWriter, r *http.Request) error {
	var body tokenizeRequest
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	prompt, param, err := body.prompt()
	if err != nil {
		return err
	}
	target, err := body.Request(r)
	if err != nil {
		return err
	}
	model := target.GetModel()
	got, err := h.Backend.Tokenize(r.Context(), model, &inferencev1.TokenizeRequest{Prompts: []*inferencev1.Prompt{prompt}})
	if err != nil {
		return edge.ErrorOf(err, model, param)
	}
	out := struct {
		Count       int      `json:"count"`
		MaxModelLen uint32   `json:"max_model_len"`
		Tokens      []uint32 `json:"tokens"`
		TokenStrs   []string `json:"token_strs"`
	}{MaxModelLen: got.GetMaxModelLen(), Tokens: []uint32{}}
	for _, p := range got.GetPrompts() {
		out.Tokens = append(out.Tokens, p.GetIds()...)
	}
	out.Count = len(out.Tokens)
	if body.ReturnTokenStrs {
		out.TokenStrs = []string{}
		for begin := 0; begin < len(out.Tokens); begin += maxTexts {
			req := &inferencev1.DetokenizeRequest{}
			for _, id := range out.Tokens[begin:min(begin+maxTexts, len(out.Tokens))] {
				req.Prompts = append(req.Prompts, &inferencev1.TokenIds{Ids: []uint32{id}})
			}
			texts, err := h.Backend.Detokenize(r.Context(), model, req)
			if err != nil {
				return edge.ErrorOf(err, model, param)
			}
			out.TokenStrs = append(out.TokenStrs, texts.GetTexts()...)
		}
	}
	return edge.WriteJSON(w, http.StatusOK, out)
}

// prompt returns the text or the chat of the request. The special tokens of a chat are those of its
// template.
func (b *tokenizeRequest) prompt() (prompt *inferencev1.Prompt, param string, err error) {
	if b.Prompt == nil {
		chat, err := b.Proto()
		if err != nil {
			return nil, "messages", err
		}
		return &inferencev1.Prompt{Kind: &inferencev1.Prompt_Chat{Chat: chat}}, "messages", nil
	}
	if len(b.Messages) > 0 {
		return nil, "prompt", edge.Invalid("messages", "`prompt` and `messages` were sent; send one")
	}
	plain := b.AddSpecialTokens != nil && !*b.AddSpecialTokens
	return &inferencev1.Prompt{Kind: &inferencev1.Prompt_Text{Text: *b.Prompt}, NoSpecialTokens: plain}, "prompt", nil
}

type detokenizeRequest struct {
	edge.Target
	Tokens []uint32 `json:"tokens"`
}

func (h *handler) detokenize(w http.ResponseWriter, r *http.Request) error {
	var body detokenizeRequest
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	if body.Tokens == nil {
		return edge.Missing("tokens", "`tokens` is missing")
	}
	target, err := body.Request(r)
	if err != nil {
		return err
	}
	text := ""
	if len(body.Tokens) > 0 {
		req := &inferencev1.DetokenizeRequest{Prompts: []*inferencev1.TokenIds{{Ids: body.Tokens}}}
		got, err := h.Backend.Detokenize(r.Context(), target.GetModel(), req)
		if err != nil {
			return edge.ErrorOf(err, target.GetModel(), "tokens")
		}
		for _, t := range got.GetTexts() {
			text += t
		}
	}
	return edge.WriteJSON(w, http.StatusOK, map[string]string{"prompt": text})
}

type generateRequest struct {
	edge.Target
	RequestID      string          `json:"request_id"`
	TokenIDs       []uint32        `json:"token_ids"`
	SamplingParams *samplingParams `json:"sampling_params"`
	Features       json.RawMessage `json:"features"`
	ContentParts   json.RawMessage `json:"content_parts"`
	Stream         bool            `json:"stream"`
	StreamOptions  *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	ReturnTokenIDs   bool            `json:"return_token_ids"`
	KVTransferParams json.RawMessage `json:"kv_transfer_params"`
}

type samplingParams struct {
	edge.Sampling
	N              *edge.Integer `json:"n"`
	Logprobs       *edge.Integer `json:"logprobs"`
	PromptLogprobs *edge.Integer `json:"prompt_logprobs"`
}

func (h *handler) generate(w http.ResponseWriter, r *http.Request) error {
	var body generateRequest
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	switch {
	case len(body.TokenIDs) == 0:
		return edge.Missing("token_ids", "`token_ids` must have at least one token id")
	case edge.IsSet(body.Features):
		return edge.Unsupported("features", "this model reads text")
	case edge.IsSet(body.ContentParts):
		return edge.Unsupported("content_parts", "this model reads text")
	case edge.IsSet(body.KVTransferParams):
		return edge.Unsupported("kv_transfer_params", "a worker computes the whole prompt itself")
	}
	given := body.SamplingParams
	if given == nil {
		given = &samplingParams{}
	}
	req, err := body.Request(r)
	if err != nil {
		return err
	}
	if req.Params, err = given.Params(); err != nil {
		return err
	}
	if req.N, err = edge.Completions(given.N); err != nil {
		return err
	}
	if req.Params.TopLogprobs, err = edge.Top("logprobs", given.Logprobs); err != nil {
		return err
	}
	if req.PromptTopLogprobs, err = edge.Top("prompt_logprobs", given.PromptLogprobs); err != nil {
		return err
	}
	req.PromptLogprobs, req.TokenBytes = given.PromptLogprobs != nil, given.Logprobs != nil
	if req.Params.MaxTokens != nil && req.GetParams().GetMaxTokens() == 0 && !req.GetPromptLogprobs() {
		return edge.Invalid("max_tokens", "`max_tokens` must be at least 1, or 0 with `prompt_logprobs`")
	}
	req.Prompts = []*inferencev1.Prompt{{Kind: &inferencev1.Prompt_Tokens{Tokens: &inferencev1.TokenIds{Ids: body.TokenIDs}}}}
	return h.Complete(w, r, req, body.Stream, &writer{body: &body, given: given}, "token_ids")
}
