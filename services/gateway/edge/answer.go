package edge

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
)

// Usage counts tokens.
type Usage struct {
	Prompt     int
	Completion int
	Cached     int // of Prompt
	Reasoning  int // of Completion
}

// Answer is the part of a response that has arrived.
type Answer struct {
	ID       string // of the request, without a prefix
	Created  time.Time
	Model    string // as requested; the served one if none was named
	Session  string
	Usage    Usage
	Version  *uint64 // newest weights version so far
	prompts  map[uint32]bool
	requests *gatewayv1.CompleteRequest
}

// Fingerprint is the newest weights version in the form of OpenAI's system_fingerprint, or "".
func (a *Answer) Fingerprint() string {
	if a.Version == nil {
		return ""
	}
	return "weights-v" + strconv.FormatUint(*a.Version, 10)
}

// Writer writes the responses of one endpoint to one request.
type Writer interface {
	// Whole returns the body of a response that is not streamed. The completions are in order.
	Whole(a *Answer, all []*Completion) (any, error)
	// Piece writes the events of a piece.
	Piece(s *Stream, a *Answer, piece *Completion) error
	// End writes the events after the last piece.
	End(s *Stream, a *Answer) error
	// Failed writes the event of an error. It is the last one.
	Failed(s *Stream, err *Error) error
}

// Complete completes a request and responds. prompt is the parameter that has the prompt.
func (e *Edge) Complete(w http.ResponseWriter, r *http.Request, req *gatewayv1.CompleteRequest, stream bool, writer Writer, prompt string) error {
	id, _ := r.Context().Value(requestKey{}).(string)
	a := &Answer{ID: id, Created: e.Now(), Model: req.GetModel(), prompts: map[uint32]bool{}, requests: req}
	req.RequestId = "req-" + id
	req.Stream = true // so that a caller who is gone, or a worker that is, is noticed between tokens
	var err error
	if stream {
		err = e.stream(w, r, a, writer, prompt)
	} else {
		err = e.whole(w, r, a, writer)
	}
	if err != nil {
		return ErrorOf(err, req.GetModel(), prompt)
	}
	return nil
}

// add counts a piece.
func (a *Answer) add(got *gatewayv1.CompleteResponse) *Completion {
	raw := got.GetPiece()
	a.Session = got.GetSessionId()
	if a.Model == "" {
		a.Model = got.GetModel()
	}
	if raw.WeightsVersion != nil {
		a.newest(raw.GetWeightsVersion())
	}
	for _, span := range raw.GetVersionSpans() {
		a.newest(span.GetVersion())
	}
	a.Usage.Completion += len(raw.GetTokenIds())
	if raw.GetFinishReason() != "" && !a.prompts[raw.GetPrompt()] {
		a.prompts[raw.GetPrompt()] = true
		a.Usage.Prompt += int(raw.GetPromptTokens())
		a.Usage.Cached += int(raw.GetCachedTokens())
	}
	if delta := raw.GetDelta(); delta.GetReasoning() != "" && delta.GetContent() == "" {
		a.Usage.Reasoning += len(raw.GetTokenIds())
	}
	return pieceOf(raw, a.requests.GetN(), a.requests.GetParse())
}

func (a *Answer) newest(version uint64) {
	if a.Version == nil || *a.Version < version {
		newest := version // only then on the heap
		a.Version = &newest
	}
}

// setHeader sets the session and the weights version. A stream calls it after its first token.
func (a *Answer) setHeader(header http.Header) {
	header.Set("x-rollout-session", a.Session)
	if a.Version != nil {
		header.Set("x-rollout-weights-version", strconv.FormatUint(*a.Version, 10))
	}
}

// whole writes one JSON object after the completions have ended.
func (e *Edge) whole(w http.ResponseWriter, r *http.Request, a *Answer, writer Writer) error {
	completions := map[uint32]*Assembly{}
	err := e.Backend.Complete(r.Context(), a.requests, func(got *gatewayv1.CompleteResponse) error {
		piece := a.add(got)
		if completions[piece.Index] == nil {
			completions[piece.Index] = &Assembly{}
		}
		completions[piece.Index].Add(piece)
		return nil
	})
	if err != nil {
		return err
	}
	var all []*Completion
	for _, index := range slices.Sorted(maps.Keys(completions)) {
		all = append(all, completions[index].Whole())
	}
	a.setHeader(w.Header())
	body, err := writer.Whole(a, all)
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, body)
}

// stream writes server-sent events. An error before the first piece is returned; after it, the
// error is an event.
func (e *Edge) stream(w http.ResponseWriter, r *http.Request, a *Answer, writer Writer, prompt string) error {
	s := newStream(w)
	begun := false
	err := e.Backend.Complete(r.Context(), a.requests, func(got *gatewayv1.CompleteResponse) error {
		piece := a.add(got)
		if !begun {
			begun = true
			w.Header().Set("Content-Type", "text/event-stream")
			w.Header().Set("Cache-Control", "no-cache")
			w.Header().Set("X-Accel-Buffering", "no") // proxies pass each event on at once
			a.setHeader(w.Header())
			w.WriteHeader(http.StatusOK)
		}
		if err := writer.Piece(s, a, piece); err != nil {
			return err
		}
		return s.flush()
	})
	if !begun {
		return err
	}
	if err == nil {
		err = writer.End(s, a)
	}
	if err != nil && r.Context().Err() == nil {
		failure := ErrorOf(err, a.Model, prompt)
		e.logged(w, r, failure, err)
		_ = writer.Failed(s, failure)
	}
	_ = s.flush()
	return nil
}

// Stream writes server-sent events. The events of a piece are one write to the connection.
type Stream struct {
	client http.ResponseWriter
	http   *http.ResponseController
	events bytes.Buffer // since the last flush
	json   *json.Encoder
}

func newStream(w http.ResponseWriter) *Stream {
	s := &Stream{client: w, http: http.NewResponseController(w)}
	s.json = json.NewEncoder(&s.events)
	s.json.SetEscapeHTML(false)
	return s
}

// Event writes an event with a JSON body. name may be empty.
func (s *Stream) Event(name string, body any) error {
	head := "data: "
	if name != "" {
		head = "event: " + name + "\ndata: "
	}
	return s.encode(head, body, "")
}

// Within writes an event with a JSON body between two parts of JSON that are encoded already.
func (s *Stream) Within(head string, body any, tail string) error {
	return s.encode("data: "+head, body, tail)
}

func (s *Stream) encode(head string, body any, tail string) error {
	before := s.events.Len()
	s.events.WriteString(head)
	if err := s.json.Encode(body); err != nil { // it ends with a newline
		s.events.Truncate(before)
		return err
	}
	s.events.Truncate(s.events.Len() - 1)
	s.events.WriteString(tail)
	s.events.WriteString("\n\n")
	return nil
}

// Done writes the event that ends a stream of OpenAI.
func (s *Stream) Done() error {
	s.events.WriteString("data: [DONE]\n\n")
	return nil
}

func (s *Stream) flush() error {
	if s.events.Len() == 0 {
		return nil
	}
	_, err := s.client.Write(s.events.Bytes())
	s.events.Reset()
	if err != nil {
		return err
	}
	return s.http.Flush()
}
