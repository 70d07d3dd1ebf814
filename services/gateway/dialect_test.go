package gateway_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/rollout-rl/rollout/services/gateway"
)

// exchange is one request of a golden table. Its header lines are "Name: value".
type exchange struct{ name, method, path, body, headers string }

// unique is the part of ids that differs between runs.
var unique = regexp.MustCompile(`(-|_|")[0-9a-z]{26}\b`)

// TestDialects compares the responses of each dialect, and what the worker was sent, with
// testdata/DIALECT.golden.
func TestDialects(t *testing.T) {
	t.Parallel()
	for dialect, table := range map[string][]exchange{"openai": openaiTable()} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			worker := &fakeWorker{model: "tiny"}
			s, _ := serve(t, gateway.Config{}, worker)
			var got bytes.Buffer
			for _, c := range table {
				worker.last = nil
				req, err := http.NewRequestWithContext(t.Context(), c.method, s.URL()+c.path, strings.NewReader(c.body))
				if err != nil {
					t.Fatal(err)
				}
				for _, line := range strings.Fields(strings.ReplaceAll(c.headers, ": ", ":")) {
					name, value, _ := strings.Cut(line, ":")
					req.Header.Set(name, value)
				}
				resp, body := send(t, http.DefaultClient, req)
				got.WriteString("# " + c.name + "\n" + c.method + " " + c.path + " " + c.body + "\n" + c.headers)
				if last := worker.last; last != nil {
					last.RequestId = ""
					raw, err := protojson.Marshal(last)
					if err != nil {
						t.Fatal(err)
					}
					got.WriteString("-> ")
					if err := json.Compact(&got, raw); err != nil { // protojson varies its spaces
						t.Fatal(err)
					}
					got.WriteString("\n")
				}
				if session := resp.Header.Get("x-rollout-session"); session != "" && !strings.HasPrefix(session, "sess-") {
					got.WriteString("x-rollout-session: " + session + "\n")
				}
				got.WriteString(resp.Status + "\n" + unique.ReplaceAllString(body, "${1}ID") + "\n")
			}
			golden(t, filepath.Join("testdata", dialect+".golden"), got.String())
		})
	}
}

// golden compares got with a file.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the responses differ from %s (run with -update and check the difference):\n%s", path, got)
	}
}

func openaiTable() []exchange {
	chat, text := "/v1/chat/completions", "/v1/completions"
	hello := `"model":"tiny","messages":[{"role":"user","content":"hi"}]`
	search := `{"type":"function","function":{"name":"search","description":"Find pages.","parameters":{"type":"object","properties":{"q":{"type":"integer"}}},"strict":true}}`
	return []exchange{
		{name: "chat", method: "POST", path: chat, body: `{` + hello + `}`},
		{name: "streamed chat", method: "POST", path: chat, body: `{"stream":true,"stream_options":{"include_usage":true},` + hello + `}`},
		{name: "tool call", method: "POST", path: chat, body: `{"tools":[` + search + `],"parallel_tool_calls":false,` + hello + `}`},
		{name: "streamed tool call", method: "POST", path: chat, body: `{"stream":true,"tools":[` + search + `],"tool_choice":{"type":"function","function":{"name":"search"}},` + hello + `}`},
		{name: "no tool", method: "POST", path: chat, body: `{"tools":[` + search + `],"tool_choice":"none",` + hello + `}`},
		{name: "function call", method: "POST", path: chat, body: `{"functions":[{"name":"search"}],"function_call":{"name":"search"},` + hello + `}`},
		{
			name: "history with tools", method: "POST", path: chat,
			body: `{"model":"tiny","tools":[` + search + `],"messages":[{"role":"developer","content":"be brief"},{"role":"user","content":[{"type":"text","text":"hi"}]},` +
				`{"role":"assistant","content":null,"reasoning_content":"hm","tool_calls":[{"id":"call_1","type":"function","function":{"name":"search","arguments":"{\"q\":1}"}}]},` +
				`{"role":"tool","tool_call_id":"call_1","content":"no page"}]}`,
		},
		{
			name: "sampling", method: "POST", path: chat,
			body: `{"temperature":0.5,"top_p":0.9,"top_k":5,"min_p":0.1,"seed":7,"stop":["x"],"max_completion_tokens":2,"min_tokens":1,"presence_penalty":1,"frequency_penalty":-1,` +
				`"repetition_penalty":1.1,"logit_bias":{"5":-100},"stop_token_ids":[3],"ignore_eos":true,` + hello + `}`,
		},
		{name: "JSON schema", method: "POST", path: chat, body: `{"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"type":"object"}}},` + hello + `}`},
		{name: "JSON object", method: "POST", path: chat, body: `{"response_format":{"type":"json_object"},` + hello + `}`},
		{name: "structured outputs", method: "POST", path: chat, body: `{"structured_outputs":{"choice":["a","b"]},` + hello + `}`},
		{name: "regex", method: "POST", path: chat, body: `{"guided_regex":"a+",` + hello + `}`},
		{name: "template variables", method: "POST", path: chat, body: `{"chat_template_kwargs":{"enable_thinking":false},"reasoning_effort":"low",` + hello + `}`},
		{name: "continued message", method: "POST", path: chat, body: `{"model":"tiny","continue_final_message":true,"add_generation_prompt":false,"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"o"}]}`},
		{name: "logprobs", method: "POST", path: chat, body: `{"logprobs":true,"top_logprobs":2,"max_tokens":1,` + hello + `}`},
		{name: "token ids", method: "POST", path: chat, body: `{"return_token_ids":true,` + hello + `}`},
		{name: "streamed token ids", method: "POST", path: chat, body: `{"return_token_ids":true,"stream":true,"logprobs":true,"return_tokens_as_token_ids":true,"max_tokens":1,` + hello + `}`},
		{name: "session in the body", method: "POST", path: chat, body: `{"session_id":"a",` + hello + `}`},
		{name: "session and versions in headers", method: "POST", path: chat, body: `{` + hello + `}`, headers: "X-Session-ID: a\nx-rollout-weights-version: 12\n"},
		{name: "session in the URL", method: "POST", path: "/sessions/a" + chat, body: `{` + hello + `}`},
		{name: "text", method: "POST", path: text, body: `{"model":"tiny","prompt":["a",""],"n":2,"stop":" three"}`},
		{name: "echo", method: "POST", path: text, body: `{"model":"tiny","prompt":"a","echo":true,"logprobs":2,"max_tokens":1}`},
		{name: "echo alone", method: "POST", path: text, body: `{"model":"tiny","prompt":[7,8],"echo":true,"logprobs":1,"max_tokens":0}`},
		{name: "streamed echo", method: "POST", path: text, body: `{"model":"tiny","prompt":"a","echo":true,"stream":true}`},
		{name: "streamed echo with logprobs", method: "POST", path: text, body: `{"model":"tiny","prompt":[7,8],"echo":true,"logprobs":1,"stream":true,"max_tokens":2}`},
		{name: "prompt logprobs", method: "POST", path: text, body: `{"model":"tiny","prompt":[7,8],"prompt_logprobs":1,"return_token_ids":true,"stream":true,"max_tokens":1}`},
	}
}
