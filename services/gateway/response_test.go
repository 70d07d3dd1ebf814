package gateway_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	sessionv1 "github.com/rollout-rl/rollout/proto/gen/rollout/session/v1"
	"github.com/rollout-rl/rollout/services/gateway"
	"github.com/rollout-rl/rollout/services/gateway/sqlstore"
)

// remembered returns the segments of a chat and its completion, with their messages.
func remembered(req *inferencev1.GenerateRequest, said []token) []*sessionv1.Segment {
	var messages []string
	for _, m := range req.GetPrompts()[0].GetChat().GetMessages() {
		messages = append(messages, jsonOf(map[string]any{"role": m.GetRole(), "content": m.GetContent()}))
	}
	session, have, parent := req.GetSession().GetSessionId(), req.GetSession().GetSegments(), ""
	for _, s := range have { // the path that the messages continue
		n := len(s.GetMessages())
		if s.GetParentSegmentId() == parent && n <= len(messages) && contents(s.GetMessages()) == contents(messages[:n]) {
			parent, messages = s.GetSegmentId(), messages[n:]
		}
	}
	var whole inferencev1.MessageDelta
	var call map[string]any
	for _, t := range said {
		whole.Content, whole.Reasoning = whole.GetContent()+t.delta.GetContent(), whole.GetReasoning()+t.delta.GetReasoning()
		for _, c := range t.delta.GetToolCalls() {
			if call == nil {
				call = map[string]any{"name": c.GetName(), "arguments": ""}
			}
			call["arguments"] = call["arguments"].(string) + c.GetArguments()
		}
	}
	message := map[string]any{"role": "assistant", "content": whole.GetContent(), "reasoning_content": whole.GetReasoning()}
	if call != nil {
		message["tool_calls"] = []any{map[string]any{"id": "call_1", "type": "function", "function": call}}
	}
	prompt := inline(session, fmt.Sprint("s", len(have)), parent, sessionv1.Role_ROLE_USER, 1, 2)
	answer := inline(session, fmt.Sprint("s", len(have)+1), prompt.GetSegmentId(), sessionv1.Role_ROLE_ASSISTANT, 3)
	prompt.Messages, answer.Messages = messages, []string{jsonOf(message)}
	return []*sessionv1.Segment{prompt, answer}
}

func jsonOf(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// contents returns the roles and contents of messages in JSON.
func contents(messages []string) (text string) {
	for _, raw := range messages {
		var m struct{ Role, Content string }
		_ = json.Unmarshal([]byte(raw), &m)
		text += m.Role + ": " + m.Content + "|"
	}
	return text
}

// Responses can be read and continued after the gateway has started again, until they are deleted.
func TestResponsesOutliveTheGateway(t *testing.T) {
	t.Parallel()
	folder := sqldb.Files(t.TempDir())
	worker := &fakeWorker{model: "tiny", remembers: true}
	var s *gateway.Server
	start := func() (stop func()) {
		store, err := sqlstore.Open(t.Context(), folder)
		if err != nil {
			t.Fatal(err)
		}
		worker.mu.Lock()
		worker.asked = false
		worker.mu.Unlock()
		server, _, end := runWith(t, gateway.Config{}, &ledger{}, func(d *gateway.Deps) { d.Store = store }, worker)
		s = server
		return func() {
			if err := errors.Join(<-end(), store.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
	respond := func(body string) (id, session, answer string) {
		t.Helper()
		resp, answer := do(t, s, "POST", "/v1/responses", body, "")
		if strings.Contains(body, `"stream":true`) {
			lines := strings.Split(strings.TrimSpace(answer), "\n")
			answer = strings.TrimPrefix(lines[len(lines)-1], "data: ")
			var done struct{ Response json.RawMessage }
			if err := json.Unmarshal([]byte(answer), &done); err != nil {
				t.Fatalf("%v: %s", err, answer)
			}
			answer = string(done.Response)
		}
		var got struct{ ID string }
		if err := json.Unmarshal([]byte(answer), &got); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s %s", resp.Status, answer)
		}
		return got.ID, resp.Header.Get("x-rollout-session"), answer
	}
	sent := func() (text string) {
		worker.mu.Lock()
		defer worker.mu.Unlock()
		for _, m := range worker.last.GetPrompts()[0].GetChat().GetMessages() {
			text += m.GetRole() + ": " + m.GetContent() + "|"
		}
		return text
	}
	read := func(method, path string, status int, want string) {
		t.Helper()
		if resp, body := do(t, s, method, "/v1/responses/"+path, "", ""); resp.StatusCode != status || !strings.Contains(body, want) {
			t.Errorf("%s %s: %s %s, want %s", method, path, resp.Status, body, want)
		}
	}

	stop := start()
	first, session, body := respond(`{"model":"tiny","input":"hi","instructions":"be brief"}`)
	second, same, _ := respond(`{"model":"tiny","input":"and what?","stream":true,"tools":[{"type":"function","name":"f"}],"previous_response_id":"` + first + `"}`)
	if session == "" || same != session {
		t.Errorf("the sessions are %q and %q", session, same)
	}
	if got, want := sent(), "user: hi|assistant: one two three|user: and what?|"; got != want {
		t.Errorf("the worker was sent %s, want %s", got, want)
	}
	unstored, _, _ := respond(`{"model":"tiny","input":"hi","store":false}`)
	stop()

	stop = start()
	resp, again := do(t, s, "GET", "/v1/responses/"+first, "", "")
	var got, want any
	if json.Unmarshal([]byte(body), &want) != nil || json.Unmarshal([]byte(again), &got) != nil || resp.StatusCode != http.StatusOK || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s %s, want %s", resp.Status, again, body)
	}
	read("GET", second, 200, `"previous_response_id":"`+first+`"`)
	read("GET", second+"/input_items", 200, "and what?")
	read("GET", unstored, 404, "response_not_found")
	_, same, _ = respond(`{"model":"tiny","previous_response_id":"` + second + `","input":[{"type":"function_call_output","call_id":"call_1","output":"no page"}]}`)
	if got, want := sent(), "user: hi|assistant: one two three|user: and what?|assistant: |tool: no page|"; got != want || same != session {
		t.Errorf("the worker was sent %s in %s, want %s in %s", got, same, want, session)
	}
	called := worker.last.GetPrompts()[0].GetChat().GetMessages()[3]
	if called.GetReasoning() != "hm" || called.GetToolCalls()[0].GetName() != "f" {
		t.Errorf("the turn lost its call: %v", called)
	}
	read("DELETE", first, 200, `"deleted":true`)
	read("DELETE", first, 404, "response_not_found")
	stop()

	stop = start()
	defer stop()
	read("GET", first, 404, "response_not_found")
	for _, id := range []string{first, unstored, "resp_x", `resp_\u0000`} {
		if resp, body := do(t, s, "POST", "/v1/responses", `{"model":"tiny","input":"x","previous_response_id":"`+id+`"}`, ""); resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %s %s", id, resp.Status, body)
		}
	}
}

// full is a store that has no space for responses.
type full struct{ gateway.Store }

func (full) KeepResponse(context.Context, *gateway.Response) error { return rpcerr.ErrDiskFull }

// A response that can't be stored is an error, because the client could not read it again.
func TestResponsesThatAreNotStoredFail(t *testing.T) {
	t.Parallel()
	s, _, _ := runWith(t, gateway.Config{}, &ledger{sessions: map[string]*gateway.Session{}}, func(d *gateway.Deps) { d.Store = full{d.Store} }, &fakeWorker{model: "tiny"})
	if resp, body := do(t, s, "POST", "/v1/responses", `{"model":"tiny","input":"hi"}`, ""); resp.StatusCode == http.StatusOK || !strings.Contains(body, rpcerr.ReasonDiskFull) {
		t.Errorf("%s %s", resp.Status, body)
	}
	resp, body := do(t, s, "POST", "/v1/responses", `{"model":"tiny","input":"hi","stream":true}`, "")
	if strings.Contains(body, "response.completed") || !strings.Contains(body, "event: error") || !strings.Contains(body, rpcerr.ReasonDiskFull) {
		t.Errorf("%s %s", resp.Status, body)
	}
	if resp, body := do(t, s, "POST", "/v1/responses", `{"model":"tiny","input":"hi","store":false}`, ""); resp.StatusCode != http.StatusOK {
		t.Errorf("not to be stored: %s %s", resp.Status, body)
	}
}
