package openai

import (
	"encoding/json"
	"strconv"

	"github.com/rollout-rl/rollout/services/gateway/edge"
)

// object is a JSON object of the Responses API.
type object = map[string]any

// responseWriter writes a completion as a response. Its output is a list of items: reasoning, a
// message, function calls; at most one of them is open.
type responseWriter struct {
	body  *responsesRequest
	items []json.RawMessage // of the input
	keep  func(*edge.StoredResponse) error

	stream   *edge.Stream // nil: no events
	failed   error        // of the stream
	begun    bool
	sequence int
	output   []object
	kind     string // of the open item: reasoning, message, call N
	text     string // of the open item
	scored   []sampledLogprob
	said     edge.Assembly // everything so far
}

// Whole implements edge.Writer.
func (f *responseWriter) Whole(a *edge.Answer, all []*edge.Completion) (any, error) {
	if len(all) > 0 {
		f.add(a, all[0])
	}
	return f.finish(a)
}

// Piece implements edge.Writer.
func (f *responseWriter) Piece(s *edge.Stream, a *edge.Answer, piece *edge.Completion) error {
	f.stream = s
	if !f.begun {
		f.begun = true
		f.event("response.created", object{"response": f.response(a, "in_progress")})
		f.event("response.in_progress", object{"response": f.response(a, "in_progress")})
	}
	f.add(a, piece)
	return f.failed
}

// End implements edge.Writer.
func (f *responseWriter) End(_ *edge.Stream, a *edge.Answer) error {
	done, err := f.finish(a)
	if err != nil {
		return err
	}
	status, _ := done["status"].(string)
	f.event("response."+status, object{"response": done})
	return f.failed
}

// Failed implements edge.Writer.
func (f *responseWriter) Failed(s *edge.Stream, err *edge.Error) error {
	f.stream = s
	facts := err.Facts()
	f.event("error", object{"code": err.Code, "message": err.Error(), "param": nil, "reason": facts.Reason, "fix": facts.Fix})
	return f.failed
}

// event sends a typed event with the next sequence number.
func (f *responseWriter) event(name string, body object) {
	if f.stream == nil || f.failed != nil {
		return
	}
	body["type"], body["sequence_number"] = name, f.sequence
	f.sequence++
	f.failed = f.stream.Event(name, body)
}

// add adds a piece to the output, and sends its events.
func (f *responseWriter) add(a *edge.Answer, piece *edge.Completion) {
	f.said.Add(piece)
	m := piece.Message
	if m.Reasoning != "" {
		f.open("reasoning", object{"type": "reasoning", "id": f.itemID("rs_", a), "summary": []any{}, "content": []any{}})
		f.text += m.Reasoning
		f.event("response.reasoning_text.delta", f.place(object{"content_index": 0, "delta": m.Reasoning}))
	}
	if m.Content != "" {
		f.openMessage(a)
		f.text += m.Content
		scored := f.score(piece.Tokens)
		f.scored = append(f.scored, scored...)
		f.event("response.output_text.delta", f.place(object{"content_index": 0, "delta": m.Content, "logprobs": scored}))
	}
	for _, call := range m.Calls {
		f.open("call "+strconv.FormatUint(uint64(call.Index), 10), object{
			"type": "function_call", "id": f.itemID("fc_", a), "call_id": call.ID, "name": call.Name, "arguments": "",
		})
		if call.Arguments != "" {
			f.text += call.Arguments
			f.event("response.function_call_arguments.delta", f.place(object{"delta": call.Arguments}))
		}
	}
	if piece.Finish != "" {
		if len(f.output) == 0 {
			f.openMessage(a)
		}
		f.close(piece.Finish)
	}
}

func (f *responseWriter) itemID(prefix string, a *edge.Answer) string {
	return prefix + strconv.Itoa(len(f.output)) + "_" + a.ID
}

// place adds the place of the open item to an event.
func (f *responseWriter) place(body object) object {
	last := len(f.output) - 1
	body["item_id"], body["output_index"] = f.output[last]["id"], last
	return body
}

func textPart(text string, scored []sampledLogprob) object {
	if scored == nil {
		scored = []sampledLogprob{}
	}
	return object{"type": "output_text", "text": text, "annotations": []any{}, "logprobs": scored}
}

// open begins an item, unless it is the open one.
func (f *responseWriter) open(kind string, it object) {
	if f.kind == kind {
		return
	}
	f.close("stop")
	f.kind, f.text, f.scored = kind, "", nil
	it["status"] = "in_progress"
	f.output = append(f.output, it)
	f.event("response.output_item.added", object{"output_index": len(f.output) - 1, "item": it})
}

func (f *responseWriter) openMessage(a *edge.Answer) {
	if f.kind == "message" {
		return
	}
	f.open("message", object{"type": "message", "id": f.itemID("msg_", a), "role": "assistant", "content": []any{}})
	f.event("response.content_part.added", f.place(object{"content_index": 0, "part": textPart("", nil)}))
}

// close ends the open item.
func (f *responseWriter) close(finish string) {
	if f.kind == "" {
		return
	}
	kind := f.kind
	f.kind = ""
	last := len(f.output) - 1
	it := object{}
	for key, value := range f.output[last] { // the event of its beginning keeps its own
		it[key] = value
	}
	f.output[last] = it
	it["status"] = "completed"
	if finish == "length" {
		it["status"] = "incomplete"
	}
	switch kind {
	case "reasoning":
		it["content"] = []any{object{"type": "reasoning_text", "text": f.text}}
		f.event("response.reasoning_text.done", f.place(object{"content_index": 0, "text": f.text}))
	case "message":
		part := textPart(f.text, f.scored)
		it["content"] = []any{part}
		f.event("response.output_text.done", f.place(object{"content_index": 0, "text": f.text, "logprobs": part["logprobs"]}))
		f.event("response.content_part.done", f.place(object{"content_index": 0, "part": part}))
	default:
		it["arguments"] = f.text
		f.event("response.function_call_arguments.done", f.place(object{"name": it["name"], "arguments": f.text}))
	}
	f.event("response.output_item.done", object{"output_index": last, "item": it})
}

// score returns the logprobs of tokens of the text, if they were requested.
func (f *responseWriter) score(tokens []edge.Token) []sampledLogprob {
	if !f.body.logprobs() {
		return []sampledLogprob{}
	}
	text := []edge.Token{}
	for _, t := range tokens {
		if t.Content {
			text = append(text, t)
		}
	}
	return ChatLogprobs(text, false).Content
}

// finish returns the whole response. It is stored before, so that the client can read it again.
func (f *responseWriter) finish(a *edge.Answer) (object, error) {
	status := "completed"
	if f.said.Whole().Finish == "length" {
		status = "incomplete"
	}
	out := f.response(a, status)
	if !f.kept() {
		return out, nil
	}
	body, err := json.Marshal(out)
	if err != nil {
		return nil, err
	}
	items, err := json.Marshal(f.items)
	if err != nil {
		return nil, err
	}
	return out, f.keep(&edge.StoredResponse{ID: responseID(a.ID), Session: a.Session, Body: body, Input: items})
}

// kept reports whether a later response may continue this one.
func (f *responseWriter) kept() bool { return f.body.Store == nil || *f.body.Store }

// response returns the response object.
func (f *responseWriter) response(a *edge.Answer, status string) object {
	b := f.body
	out := object{
		"id": responseID(a.ID), "object": "response", "created_at": a.Created.Unix(), "status": status, "background": false, "error": nil,
		"incomplete_details": nil, "instructions": b.Instructions, "max_output_tokens": b.MaxOutputTokens, "model": a.Model,
		"output": []any{}, "parallel_tool_calls": b.ParallelToolCalls == nil || *b.ParallelToolCalls, "previous_response_id": b.PreviousResponseID,
		"reasoning": b.Reasoning, "store": f.kept(), "temperature": b.Temperature, "top_p": b.TopP,
		"tool_choice": orElse(b.ToolChoice, `"auto"`), "tools": []any{}, "truncation": "disabled", "text": object{"format": object{"type": "text"}},
		"usage": nil, "metadata": object{}, "session_id": a.Session,
	}
	if b.Text != nil && b.Text.Format.Type != "" {
		out["text"] = b.Text
	}
	if len(b.Tools) > 0 {
		out["tools"] = b.Tools
	}
	if b.Metadata != nil {
		out["metadata"] = b.Metadata
	}
	if print := a.Fingerprint(); print != "" {
		out["system_fingerprint"] = print
	}
	if status == "in_progress" {
		return out
	}
	out["output"] = f.output
	if status == "incomplete" {
		out["incomplete_details"] = object{"reason": "max_output_tokens"}
	}
	out["usage"] = object{
		"input_tokens": a.Usage.Prompt, "input_tokens_details": object{"cached_tokens": a.Usage.Cached}, "output_tokens": a.Usage.Completion,
		"output_tokens_details": object{"reasoning_tokens": a.Usage.Reasoning}, "total_tokens": a.Usage.Prompt + a.Usage.Completion,
	}
	out["weight_versions"] = f.said.Whole().Versions
	if b.ReturnTokenIDs {
		out["prompt_token_ids"], out["token_ids"], out["token_logprobs"] = f.said.Whole().Prompt.IDs, f.said.Whole().IDs(), f.said.Whole().SampledLogprobs()
	}
	return out
}

func orElse(raw json.RawMessage, absent string) json.RawMessage {
	if len(raw) == 0 || string(raw) == "null" {
		return json.RawMessage(absent)
	}
	return raw
}
