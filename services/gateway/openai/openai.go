// Package openai is the dialect of OpenAI: models, chat completions, completions, and responses, so
// that OpenAI's clients work unmodified, with the fields of vLLM that its users send.
//
// Fields that would change the completion and are not supported (images, audio, suffix) are
// refused. Other unknown fields are ignored, as OpenAI's clients expect. Logprobs are those of the
// unmodified softmax. With `return_token_ids` a response also has prompt_token_ids and token_ids as
// in vLLM, and token_logprobs: the logprob of each token under the distribution it was sampled
// from.
//
// A response has the weights version in system_fingerprint ("weights-v12"); the fingerprint of each
// chunk of a stream has the newest version so far.
package openai

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

// Routes are the endpoints of the dialect.
func Routes(e *edge.Edge) []edge.Route {
	h := &handler{e}
	route := func(method, path, about string, request any, serve func(w http.ResponseWriter, r *http.Request) error, required ...string) edge.Route {
		return edge.Route{
			Method: method, Path: path, Tag: "OpenAI", About: about, Request: request, Required: required, Serve: serve, Body: edge.PlainBody,
			Session: true,
		}
	}
	return []edge.Route{
		route(http.MethodGet, "/v1/models", "The policies that are served.", nil, h.models),
		route(http.MethodGet, "/v1/models/{model...}", "One policy.", nil, h.model),
		route(http.MethodPost, "/v1/chat/completions", "Complete a chat.", chatRequest{}, h.chat, "model", "messages"),
		route(http.MethodPost, "/v1/completions", "Complete texts or token ids.", completionRequest{}, h.completions, "model", "prompt"),
		route(http.MethodPost, "/v1/responses", "Respond to items, or continue a response.", responsesRequest{}, h.createResponse, "model", "input"),
		route(http.MethodGet, "/v1/responses/{id}", "A stored response.", nil, h.response),
		route(http.MethodDelete, "/v1/responses/{id}", "Delete a stored response.", nil, h.deleteResponse),
		route(http.MethodGet, "/v1/responses/{id}/input_items", "The input of a stored response.", nil, h.responseInput),
	}
}

type handler struct{ *edge.Edge }

type modelJSON struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
	// Beyond OpenAI's fields.
	RunID           string   `json:"run_id"`
	WeightsVersion  uint64   `json:"weights_version"`
	WeightsVersions []uint64 `json:"weights_versions"` // that workers hold
	WeightsDigest   string   `json:"weights_digest,omitempty"`
	MaxModelLen     uint32   `json:"max_model_len,omitempty"`
	// Of Anthropic.
	Type        string `json:"type"`
	DisplayName string `json:"display_name"`
	CreatedAt   string `json:"created_at"`
}

func modelOf(m *gatewayv1.Model) modelJSON {
	return modelJSON{
		ID: m.GetName(), Object: "model", Created: m.GetCreateTime().GetSeconds(), OwnedBy: "rollout", RunID: m.GetRunId(),
		WeightsVersion: m.GetWeightsVersion(), WeightsVersions: m.GetWeightsVersions(), WeightsDigest: m.GetWeightsDigest(), MaxModelLen: m.GetMaxModelLen(),
		Type: "model", DisplayName: m.GetName(), CreatedAt: m.GetCreateTime().AsTime().Format(time.RFC3339),
	}
}

func (h *handler) models(w http.ResponseWriter, r *http.Request) error {
	list := struct {
		Object string      `json:"object"`
		Data   []modelJSON `json:"data"`
		// Of Anthropic.
		HasMore bool    `json:"has_more"`
		FirstID *string `json:"first_id"`
		LastID  *string `json:"last_id"`
	}{Object: "list", Data: []modelJSON{}}
	for _, m := range h.Backend.Models(r.Context()) {
		list.Data = append(list.Data, modelOf(m))
	}
	if n := len(list.Data); n > 0 {
		list.FirstID, list.LastID = &list.Data[0].ID, &list.Data[n-1].ID
	}
	return edge.WriteJSON(w, http.StatusOK, list)
}

func (h *handler) model(w http.ResponseWriter, r *http.Request) error {
	for _, m := range h.Backend.Models(r.Context()) {
		if name := r.PathValue("model"); m.GetName() == name || m.GetRunId() == name {
			return edge.WriteJSON(w, http.StatusOK, modelOf(m))
		}
	}
	return edge.UnknownModel(r.PathValue("model"))
}

// common is the fields that chat completions and completions share.
type common struct {
	edge.Target
	edge.Sampling
	N                *edge.Integer  `json:"n"`
	Stream           bool           `json:"stream"`
	StreamOptions    *streamOptions `json:"stream_options"`
	ReturnTokenIDs   bool           `json:"return_token_ids"`
	TokensAsTokenIDs bool           `json:"return_tokens_as_token_ids"`
	PromptLogprobs   *edge.Integer  `json:"prompt_logprobs"`
}

type streamOptions struct {
	IncludeUsage    bool `json:"include_usage"`
	ContinuousUsage bool `json:"continuous_usage_stats"`
}

// request makes the request for the gateway from the shared fields.
func (c *common) request(r *http.Request) (*gatewayv1.CompleteRequest, error) {
	if err := edge.InRange("temperature", c.Temperature, 0, 2); err != nil {
		return nil, err
	}
	if c.StreamOptions != nil && !c.Stream {
		return nil, edge.Invalid("stream_options", "`stream_options` requires `stream: true`")
	}
	params, err := c.Params()
	if err != nil {
		return nil, err
	}
	n, err := edge.Completions(c.N)
	if err != nil {
		return nil, err
	}
	top, err := edge.Top("prompt_logprobs", c.PromptLogprobs)
	if err != nil {
		return nil, err
	}
	req, err := c.Named(r)
	if err != nil {
		return nil, err
	}
	req.Params, req.N = params, n
	req.PromptLogprobs, req.PromptTopLogprobs = c.PromptLogprobs != nil, top
	return req, nil
}

type usage struct {
	PromptTokens      int                `json:"prompt_tokens"`
	CompletionTokens  int                `json:"completion_tokens"`
	TotalTokens       int                `json:"total_tokens"`
	PromptDetails     *promptDetails     `json:"prompt_tokens_details,omitempty"`
	CompletionDetails *completionDetails `json:"completion_tokens_details,omitempty"`
}

type promptDetails struct {
	CachedTokens int `json:"cached_tokens"`
}

type completionDetails struct {
	ReasoningTokens int `json:"reasoning_tokens"`
}

func usageOf(u edge.Usage) *usage {
	out := &usage{PromptTokens: u.Prompt, CompletionTokens: u.Completion, TotalTokens: u.Prompt + u.Completion}
	if u.Cached > 0 {
		out.PromptDetails = &promptDetails{u.Cached}
	}
	if u.Reasoning > 0 {
		out.CompletionDetails = &completionDetails{u.Reasoning}
	}
	return out
}

type envelope struct {
	ID                string `json:"id"`
	Object            string `json:"object"`
	Created           int64  `json:"created"`
	Model             string `json:"model"`
	SystemFingerprint string `json:"system_fingerprint,omitempty"`
	Choices           []any  `json:"choices"`
	Usage             *usage `json:"usage,omitempty"`
	promptParts
}

// promptParts is what a response of vLLM has of the prompt.
type promptParts struct {
	PromptTokenIDs []uint32         `json:"prompt_token_ids,omitempty"`
	PromptLogprobs []map[string]any `json:"prompt_logprobs,omitempty"`
}

// chunkWithUsage is a chunk of a stream that ends with the usage: OpenAI writes null until then.
type chunkWithUsage struct {
	envelope
	Usage *usage `json:"usage"`
}

// chunks writes the chunks of a stream.
type chunks struct {
	prefix, object string
	options        *streamOptions
	head           string // JSON of a chunk up to its choice
	headOf         string // fingerprint that head has
}

func (c *chunks) envelope(a *edge.Answer) envelope {
	return envelope{
		ID: c.prefix + a.ID, Object: c.object, Created: a.Created.Unix(), Model: a.Model, SystemFingerprint: a.Fingerprint(), Choices: []any{},
	}
}

// send writes a chunk with one choice. What most chunks have in common is encoded once.
func (c *chunks) send(s *edge.Stream, a *edge.Answer, choice any, prompt promptParts) error {
	continuous := c.options != nil && c.options.ContinuousUsage
	if continuous || len(prompt.PromptTokenIDs) > 0 || len(prompt.PromptLogprobs) > 0 {
		return c.sendAll(s, a, choice, prompt, continuous)
	}
	if fingerprint := a.Fingerprint(); c.head == "" || c.headOf != fingerprint {
		raw, err := json.Marshal(c.envelope(a))
		if err != nil {
			return err
		}
		c.head, c.headOf = strings.TrimSuffix(string(raw), "]}"), fingerprint
	}
	if c.options != nil && c.options.IncludeUsage {
		return s.Within(c.head, choice, `],"usage":null}`)
	}
	return s.Within(c.head, choice, "]}")
}

// sendAll is send of a chunk that has more.
func (c *chunks) sendAll(s *edge.Stream, a *edge.Answer, choice any, prompt promptParts, continuous bool) error {
	chunk := c.envelope(a)
	chunk.Choices, chunk.promptParts = []any{choice}, prompt
	switch {
	case continuous:
		chunk.Usage = usageOf(a.Usage)
	case c.options != nil && c.options.IncludeUsage:
		return s.Event("", chunkWithUsage{envelope: chunk})
	}
	return s.Event("", chunk)
}

// End implements edge.Writer.
func (c *chunks) End(s *edge.Stream, a *edge.Answer) error {
	if c.options != nil && c.options.IncludeUsage {
		last := c.envelope(a)
		last.Usage = usageOf(a.Usage)
		if err := s.Event("", last); err != nil {
			return err
		}
	}
	return s.Done()
}

// Failed implements edge.Writer.
func (*chunks) Failed(s *edge.Stream, err *edge.Error) error { return s.Event("", edge.PlainBody(err)) }

// extras is what a choice has beyond OpenAI's fields.
type extras struct {
	StopReason     string         `json:"stop_reason,omitempty"` // of vLLM: the stop string
	TokenIDs       []uint32       `json:"token_ids,omitempty"`
	TokenLogprobs  []float32      `json:"token_logprobs,omitempty"`
	WeightVersions []edge.Version `json:"weight_versions,omitempty"`
}

func extrasOf(c *edge.Completion, ids bool) extras {
	out := extras{StopReason: c.StopString, WeightVersions: c.Versions}
	if ids {
		out.TokenIDs, out.TokenLogprobs = c.IDs(), c.SampledLogprobs()
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

// PromptByID returns each token of a prompt by its id, with the most likely ones, as in vLLM; null
// for the first.
func PromptByID(p edge.Prompt) []map[string]any {
	type described struct {
		Logprob float32 `json:"logprob"`
		Rank    int     `json:"rank,omitempty"`
		Text    string  `json:"decoded_token"`
	}
	out := make([]map[string]any, len(p.Tokens))
	for i, token := range p.Tokens {
		if i == 0 {
			continue
		}
		out[i] = map[string]any{idOf(token): described{Logprob: edge.Finite(token.Logprob), Text: token.Text()}}
		for rank, top := range token.Top {
			out[i][idOf(top)] = described{Logprob: edge.Finite(top.Logprob), Rank: rank + 1, Text: top.Text()}
		}
	}
	return out
}
