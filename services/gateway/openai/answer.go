package openai

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/libs/id"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// form is how one of the two endpoints writes a choice.
type form interface {
	id() string                      // prefix of the answer's id
	object(stream bool) string       // OpenAI's name for the answer
	whole(c *completion) any         // a choice of a plain answer
	open(index uint32) any           // what a stream begins a choice with; nil: nothing
	piece(index uint32, p piece) any // a choice of a stream's chunk
}

// piece is some tokens of one completion and their text. A text is held back until it is whole characters, so it
// belongs to the last of the tokens; the others carry "".
type piece struct {
	text     string
	logprobs []float32
	finish   string
	prompt   prompt // of the last piece, where the request asks for it
}

func (p piece) token(i int) string {
	if i == len(p.logprobs)-1 {
		return p.text
	}
	return ""
}

// prompt is the tokens of a prompt: ids, texts, logprobs.
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

// counted is a chunk of a stream that ends with the usage: OpenAI writes null until then.
type counted struct {
	envelope
	Usage *usage `json:"usage"`
}

// tally is what an answer has gathered so far.
type tally struct {
	envelope
	used     usage
	prompts  map[uint32]bool // whose tokens were counted
	version  uint64
	session  string
	complete map[uint32]*completion
}

func (h *handler) answer(w http.ResponseWriter, r *http.Request, req *gatewayv1.CompleteRequest, f form, s sampling, blame string) error {
	now := h.Now()
	t := &tally{
		envelope: envelope{ID: f.id() + id.New(now), Object: f.object(s.Stream), Created: now.Unix(), Model: req.GetModel(), Choices: []any{}},
		prompts:  map[uint32]bool{}, complete: map[uint32]*completion{},
	}
	// Tokens one by one let logprobs be told with the text that they belong to.
	req.Stream = true
	var err error
	if s.Stream {
		err = h.stream(w, r, req, f, t, s.StreamOptions != nil && s.StreamOptions.IncludeUsage)
	} else {
		err = h.plain(w, r, req, f, t)
	}
	if err != nil {
		return errorOf(err, req.GetModel(), blame)
	}
	return nil
}

// take counts a piece and returns the number of its choice.
func (t *tally) take(req *gatewayv1.CompleteRequest, got *gatewayv1.CompleteResponse) (uint32, piece) {
	raw := got.GetPiece()
	index := raw.GetPrompt()*req.GetN() + raw.GetSample()
	t.session = got.GetSessionId()
	t.used.CompletionTokens += len(raw.GetTokenIds())
	if raw.WeightsVersion != nil || len(raw.GetVersionSpans()) > 0 {
		t.version = version(raw, t.version)
		t.SystemFingerprint = fmt.Sprintf("weights-v%d", t.version)
	}
	if raw.GetFinishReason() != "" {
		if !t.prompts[raw.GetPrompt()] {
			t.prompts[raw.GetPrompt()] = true
			t.used.PromptTokens += int(raw.GetPromptTokens())
		}
	}
	t.used.TotalTokens = t.used.PromptTokens + t.used.CompletionTokens
	logprobs := raw.GetRawLogprobs()
	if len(logprobs) == 0 { // the engine reports one logprob per token
		logprobs = raw.GetLogprobs()
	}
	return index, piece{
		text: raw.GetText(), logprobs: logprobs, finish: raw.GetFinishReason(),
		prompt: prompt{ids: raw.GetPromptTokenIds(), texts: raw.GetPromptTexts(), logprobs: raw.GetPromptLogprobs()},
	}
}

// name tells of session and weights. Of a stream, whose headers go first, it is the version that sampled the first token.
func (t *tally) name(header http.Header) {
	header.Set("x-rollout-session", t.session)
	if t.SystemFingerprint != "" {
		header.Set("x-rollout-weights-version", strconv.FormatUint(t.version, 10))
	}
}

// version is the newest weights that sampled a part of the answer so far.
func version(raw *inferencev1.GenerateResponse, newest uint64) uint64 {
	newest = max(newest, raw.GetWeightsVersion())
	for _, span := range raw.GetVersionSpans() {
		newest = max(newest, span.GetVersion())
	}
	return newest
}

func (h *handler) plain(w http.ResponseWriter, r *http.Request, req *gatewayv1.CompleteRequest, f form, t *tally) error {
	err := h.Backend.Complete(r.Context(), req, func(got *gatewayv1.CompleteResponse) error {
		index, p := t.take(req, got)
		c := t.complete[index]
		if c == nil {
			c = &completion{index: index}
			t.complete[index] = c
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
	indices := []uint32{}
	for index := range t.complete {
		indices = append(indices, index)
	}
	slices.Sort(indices)
	for _, index := range indices {
		t.Choices = append(t.Choices, f.whole(t.complete[index]))
	}
	t.Usage = &t.used
	t.name(w.Header())
	return writeJSON(w, http.StatusOK, t.envelope)
}

// stream writes server-sent events. An error before the first piece is an answer of its own; afterwards it is an event.
func (h *handler) stream(w http.ResponseWriter, r *http.Request, req *gatewayv1.CompleteRequest, f form, t *tally, withUsage bool) error {
	out := http.NewResponseController(w)
	begun := false
	opened := map[uint32]bool{}
	event := func(body any) error {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(w, "data: %s\n\n", raw); err != nil {
			return err
		}
		return out.Flush()
	}
	chunk := func(choices ...any) error {
		e := t.envelope
		e.Choices = choices
		if withUsage {
			return event(counted{envelope: e})
		}
		return event(e)
	}
	err := h.Backend.Complete(r.Context(), req, func(got *gatewayv1.CompleteResponse) error {
		index, p := t.take(req, got)
		if !begun {
			begun = true
			w.Header().Set("Content-Type", "text/event-stream")
			w.Header().Set("Cache-Control", "no-cache")
			t.name(w.Header())
			w.WriteHeader(http.StatusOK)
		}
		if first := f.open(index); first != nil && !opened[index] {
			opened[index] = true
			if err := chunk(first); err != nil {
				return err
			}
		}
		if p.text == "" && p.finish == "" && len(p.logprobs) == 0 {
			return nil
		}
		return chunk(f.piece(index, p))
	})
	if !begun {
		return err
	}
	if err != nil {
		if r.Context().Err() == nil {
			h.Log.WarnContext(r.Context(), "a gateway stream broke", "error", err)
			_ = event(map[string]*apiError{"error": errorOf(err, req.GetModel(), "")})
		}
		return nil
	}
	if withUsage {
		last := t.envelope
		last.Usage = &t.used
		_ = event(last)
	}
	_, _ = fmt.Fprint(w, "data: [DONE]\n\n")
	_ = out.Flush()
	return nil
}
