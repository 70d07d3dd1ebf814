package openai

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/libs/id"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// format is how one of the two endpoints writes a choice.
type format interface {
	id() string                      // prefix of the response's id
	object(stream bool) string       // OpenAI's name of the response
	choice(c *completion) any        // a choice of a plain response
	first(index uint32) any          // what a stream sends first for a choice; nil: nothing
	chunk(index uint32, p piece) any // a choice of a stream's chunk
}

// piece is some tokens of one completion and their text. Text is sent in whole characters, so it
// belongs to the last of the tokens; the others have "".
type piece struct {
	text     string
	logprobs []float32
	finish   string
	prompt   prompt // set in the last piece, if the request needs it
}

func (p piece) token(i int) string {
	if i == len(p.logprobs)-1 {
		return p.text
	}
	return ""
}

// prompt is the tokens of a prompt.
type prompt struct {
	ids      []uint32
	texts    []string
	logprobs []float32
}

type completion struct {
	index  uint32
	pieces []piece
	finish string
	prompt prompt
}

func (c *completion) text() string {
	var b strings.Builder
	for _, p := range c.pieces {
		b.WriteString(p.text)
	}
	return b.String()
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
}

type envelope struct {
	ID                string `json:"id"`
	Object            string `json:"object"`
	Created           int64  `json:"created"`
	Model             string `json:"model"`
	SystemFingerprint string `json:"system_fingerprint,omitempty"`
	Choices           []any  `json:"choices"`
	Usage             *usage `json:"usage,omitempty"`
}

// chunkWithUsage is a chunk of a stream that ends with the usage: OpenAI writes null until then.
type chunkWithUsage struct {
	envelope
	Usage *usage `json:"usage"`
}

// response is the part of a response that has arrived.
type response struct {
	envelope
	used    usage
	prompts map[uint32]bool // prompts whose tokens are counted
	version uint64          // newest weights version so far
	session string
}

// answer completes a request. promptParam is the parameter that has the prompt.
func (h *handler) answer(w http.ResponseWriter, r *http.Request, req *gatewayv1.CompleteRequest, f format, s sampling, promptParam string) error {
	now := h.Now()
	resp := &response{
		envelope: envelope{ID: f.id() + id.New(now), Object: f.object(s.Stream), Created: now.Unix(), Model: req.GetModel(), Choices: []any{}},
		prompts:  map[uint32]bool{},
	}
	req.Stream = true // single tokens, so that each logprob has its text
	var err error
	if s.Stream {
		err = h.stream(w, r, req, f, resp, s.StreamOptions != nil && s.StreamOptions.IncludeUsage)
	} else {
		err = h.plain(w, r, req, f, resp)
	}
	if err != nil {
		return errorOf(err, req.GetModel(), promptParam)
	}
	return nil
}

// add counts a piece and returns the index of its choice.
func (t *response) add(req *gatewayv1.CompleteRequest, got *gatewayv1.CompleteResponse) (uint32, piece) {
	raw := got.GetPiece()
	t.session = got.GetSessionId()
	t.used.CompletionTokens += len(raw.GetTokenIds())
	if raw.WeightsVersion != nil || len(raw.GetVersionSpans()) > 0 {
		t.version = newestVersion(raw, t.version)
		t.SystemFingerprint = fmt.Sprintf("weights-v%d", t.version)
	}
	if raw.GetFinishReason() != "" && !t.prompts[raw.GetPrompt()] {
		t.prompts[raw.GetPrompt()] = true
		t.used.PromptTokens += int(raw.GetPromptTokens())
	}
	t.used.TotalTokens = t.used.PromptTokens + t.used.CompletionTokens
	logprobs := raw.GetRawLogprobs()
	if len(logprobs) == 0 { // the engine reports one logprob per token
		logprobs = raw.GetLogprobs()
	}
	return raw.GetPrompt()*req.GetN() + raw.GetSample(), piece{
		text: raw.GetText(), logprobs: logprobs, finish: raw.GetFinishReason(),
		prompt: prompt{ids: raw.GetPromptTokenIds(), texts: raw.GetPromptTexts(), logprobs: raw.GetPromptLogprobs()},
	}
}

// setHeader sets the session and the weights version. A stream calls it after its first token.
func (t *response) setHeader(header http.Header) {
	header.Set("x-rollout-session", t.session)
	if t.SystemFingerprint != "" {
		header.Set("x-rollout-weights-version", strconv.FormatUint(t.version, 10))
	}
}

// newestVersion returns the newest of a version and those that sampled a piece.
func newestVersion(raw *inferencev1.GenerateResponse, newest uint64) uint64 {
	newest = max(newest, raw.GetWeightsVersion())
	for _, span := range raw.GetVersionSpans() {
		newest = max(newest, span.GetVersion())
	}
	return newest
}

// plain writes one JSON object after the completions have ended.
func (h *handler) plain(w http.ResponseWriter, r *http.Request, req *gatewayv1.CompleteRequest, f format, resp *response) error {
	completions := map[uint32]*completion{}
	err := h.Backend.Complete(r.Context(), req, func(got *gatewayv1.CompleteResponse) error {
		index, p := resp.add(req, got)
		c := completions[index]
		if c == nil {
			c = &completion{index: index}
			completions[index] = c
		}
		c.pieces = append(c.pieces, p)
		if p.finish != "" {
			c.finish, c.prompt = p.finish, p.prompt
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, index := range slices.Sorted(maps.Keys(completions)) {
		resp.Choices = append(resp.Choices, f.choice(completions[index]))
	}
	resp.Usage = &resp.used
	resp.setHeader(w.Header())
	return writeJSON(w, http.StatusOK, resp.envelope)
}

// stream writes server-sent events. An error before the first piece is returned; after it, the
// error is an event.
func (h *handler) stream(w http.ResponseWriter, r *http.Request, req *gatewayv1.CompleteRequest, f format, resp *response, withUsage bool) error {
	events := &eventStream{w: w, out: http.NewResponseController(w), withUsage: withUsage}
	opened := map[uint32]bool{}
	err := h.Backend.Complete(r.Context(), req, func(got *gatewayv1.CompleteResponse) error {
		index, p := resp.add(req, got)
		events.begin(resp)
		if first := f.first(index); first != nil && !opened[index] {
			opened[index] = true
			if err := events.chunk(resp.envelope, first); err != nil {
				return err
			}
		}
		if p.text == "" && p.finish == "" && len(p.logprobs) == 0 {
			return nil
		}
		return events.chunk(resp.envelope, f.chunk(index, p))
	})
	if !events.begun {
		return err
	}
	if err != nil {
		if r.Context().Err() == nil {
			h.Log.WarnContext(r.Context(), "a gateway stream failed", "error", err)
			_ = events.send(map[string]*apiError{"error": errorOf(err, req.GetModel(), "")})
		}
		return nil
	}
	events.end(resp)
	return nil
}

// eventStream writes the server-sent events of one response.
type eventStream struct {
	w         http.ResponseWriter
	out       *http.ResponseController
	withUsage bool // the last chunk has the usage
	begun     bool
}

// begin writes the headers, once.
func (s *eventStream) begin(resp *response) {
	if s.begun {
		return
	}
	s.begun = true
	s.w.Header().Set("Content-Type", "text/event-stream")
	s.w.Header().Set("Cache-Control", "no-cache")
	resp.setHeader(s.w.Header())
	s.w.WriteHeader(http.StatusOK)
}

// send writes one event.
func (s *eventStream) send(body any) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(s.w, "data: %s\n\n", raw); err != nil {
		return err
	}
	return s.out.Flush()
}

// chunk writes an event with one choice.
func (s *eventStream) chunk(e envelope, choice any) error {
	e.Choices = []any{choice}
	if s.withUsage {
		return s.send(chunkWithUsage{envelope: e})
	}
	return s.send(e)
}

// end writes the usage and the event that ends the stream. The client may be gone.
func (s *eventStream) end(resp *response) {
	if s.withUsage {
		last := resp.envelope
		last.Usage = &resp.used
		_ = s.send(last)
	}
	_, _ = fmt.Fprint(s.w, "data: [DONE]\n\n")
	_ = s.out.Flush()
}
