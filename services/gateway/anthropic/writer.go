package anthropic

import (
	"encoding/json"
	"strconv"

	"github.com/rollout-rl/rollout/services/gateway/edge"
)

type object = map[string]any

// writer writes a completion as a message. Its content is a list of blocks: thinking, text, calls
// of tools; at most one of them is open in a stream.
type writer struct {
	body   *request
	begun  bool
	kind   string // of the open block: thinking, text, call N
	index  int    // of the open block
	called bool
	all    edge.Assembly    // if the request wants the ids of all tokens
	last   *edge.Completion // the last piece, or all of them
}

// Whole implements edge.Writer.
func (f *writer) Whole(a *edge.Answer, all []*edge.Completion) (any, error) {
	c := &edge.Completion{}
	if len(all) > 0 {
		c = all[0]
	}
	content := []any{}
	if c.Message.Reasoning != "" {
		content = append(content, object{"type": "thinking", "thinking": c.Message.Reasoning, "signature": ""})
	}
	if c.Message.Content != "" {
		content = append(content, object{"type": "text", "text": c.Message.Content})
	}
	for _, call := range c.Message.Calls {
		f.called = true
		content = append(content, object{"type": "tool_use", "id": call.ID, "name": call.Name, "input": input(call.Arguments)})
	}
	out := f.message(a)
	out["content"], out["usage"] = content, usage(a)
	out["stop_reason"], out["stop_sequence"] = f.reason(c)
	f.extras(out, c)
	return out, nil
}

// message returns a message without content.
func (f *writer) message(a *edge.Answer) object {
	return object{
		"id": "msg_" + a.ID, "type": "message", "role": "assistant", "model": a.Model, "content": []any{}, "stop_reason": nil,
		"stop_sequence": nil, "usage": usage(a),
	}
}

func usage(a *edge.Answer) object {
	return object{
		"input_tokens": a.Usage.Prompt - a.Usage.Cached, "output_tokens": a.Usage.Completion, "cache_read_input_tokens": a.Usage.Cached,
		"cache_creation_input_tokens": 0,
	}
}

// extras adds what is beyond Anthropic's fields.
func (f *writer) extras(out object, c *edge.Completion) {
	out["weight_versions"] = c.Versions
	if f.body.ReturnTokenIDs {
		out["prompt_token_ids"], out["token_ids"], out["token_logprobs"] = c.Prompt.IDs, c.IDs(), c.SampledLogprobs()
	}
}

// input returns the arguments of a call as an object.
func input(arguments string) any {
	if arguments == "" {
		return object{}
	}
	var parsed map[string]json.RawMessage
	if json.Unmarshal([]byte(arguments), &parsed) != nil {
		return object{"INVALID_JSON": arguments}
	}
	return json.RawMessage(arguments)
}

// reason returns why the message ended, and the stop sequence that ended it.
func (f *writer) reason(c *edge.Completion) (reason string, sequence any) {
	switch {
	case c.Finish == "length":
		return "max_tokens", nil
	case c.StopString != "":
		return "stop_sequence", c.StopString
	case f.called:
		return "tool_use", nil
	}
	return "end_turn", nil
}

// Piece implements edge.Writer.
func (f *writer) Piece(s *edge.Stream, a *edge.Answer, piece *edge.Completion) error {
	e := &events{stream: s}
	if !f.begun {
		f.begun = true
		e.send("message_start", object{"message": f.message(a)})
		e.send("ping", object{})
	}
	m := piece.Message
	if m.Reasoning != "" {
		f.open(e, "thinking", object{"type": "thinking", "thinking": "", "signature": ""})
		f.delta(e, object{"type": "thinking_delta", "thinking": m.Reasoning})
	}
	if m.Content != "" {
		f.open(e, "text", object{"type": "text", "text": ""})
		f.delta(e, object{"type": "text_delta", "text": m.Content})
	}
	for _, call := range m.Calls {
		f.called = true
		f.open(e, "call "+strconv.FormatUint(uint64(call.Index), 10), object{"type": "tool_use", "id": call.ID, "name": call.Name, "input": object{}})
		if call.Arguments != "" {
			f.delta(e, object{"type": "input_json_delta", "partial_json": call.Arguments})
		}
	}
	if f.last = piece; f.body.ReturnTokenIDs {
		f.all.Add(piece)
		f.last = f.all.Whole()
	}
	return e.err
}

// End implements edge.Writer.
func (f *writer) End(s *edge.Stream, a *edge.Answer) error {
	e := &events{stream: s}
	f.close(e)
	reason, sequence := f.reason(f.last)
	last := object{"delta": object{"stop_reason": reason, "stop_sequence": sequence}, "usage": usage(a)}
	f.extras(last, f.last)
	e.send("message_delta", last)
	e.send("message_stop", object{})
	return e.err
}

// Failed implements edge.Writer.
func (f *writer) Failed(s *edge.Stream, err *edge.Error) error {
	return s.Event("error", errorBody(err))
}

// open begins a block, unless it is the open one.
func (f *writer) open(e *events, kind string, begin object) {
	if f.kind == kind {
		return
	}
	f.close(e)
	f.kind = kind
	e.send("content_block_start", object{"index": f.index, "content_block": begin})
}

func (f *writer) delta(e *events, delta object) {
	e.send("content_block_delta", object{"index": f.index, "delta": delta})
}

// close ends the open block.
func (f *writer) close(e *events) {
	if f.kind == "" {
		return
	}
	e.send("content_block_stop", object{"index": f.index})
	f.kind = ""
	f.index++
}

// events sends events until one fails.
type events struct {
	stream *edge.Stream
	err    error
}

func (e *events) send(name string, body object) {
	if e.err == nil {
		body["type"] = name
		e.err = e.stream.Event(name, body)
	}
}
