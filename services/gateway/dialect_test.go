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
var unique = regexp.MustCompile(`(-|_|")01[0-9a-z]{24}`)

// TestDialects compares the responses of each dialect, and what the worker was sent, with
// testdata/DIALECT.golden.
func TestDialects(t *testing.T) {
	t.Parallel()
	for dialect, table := range map[string][]exchange{
		"openai": openaiTable(), "responses": responsesTable(), "anthropic": anthropicTable(), "vllm": vllmTable(), "sglang": sglangTable(),
	} {
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
					if last.GetParams().GetSeed() > 1<<32 { // the gateway's; those of the requests are small
						last.Params.Seed = nil
					}
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
				got.WriteString(resp.Status + "\n" + body + "\n")
			}
			golden(t, filepath.Join("testdata", dialect+".golden"), unique.ReplaceAllString(got.String(), "${1}ID"))
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
		{name: "parameter that the engine does not support", method: "POST", path: chat, body: `{"logit_bias":{"5":1,"6":1},` + hello + `}`},
		{name: "text", method: "POST", path: text, body: `{"model":"tiny","prompt":["a",""],"n":2,"stop":" three"}`},
		{name: "text without special tokens", method: "POST", path: text, body: `{"model":"tiny","prompt":"a","add_special_tokens":false,"max_tokens":1}`},
		{name: "echo", method: "POST", path: text, body: `{"model":"tiny","prompt":"a","echo":true,"logprobs":2,"max_tokens":1}`},
		{name: "echo alone", method: "POST", path: text, body: `{"model":"tiny","prompt":[7,8],"echo":true,"logprobs":1,"max_tokens":0}`},
		{name: "streamed echo", method: "POST", path: text, body: `{"model":"tiny","prompt":"a","echo":true,"stream":true}`},
		{name: "streamed echo with logprobs", method: "POST", path: text, body: `{"model":"tiny","prompt":[7,8],"echo":true,"logprobs":1,"stream":true,"max_tokens":2}`},
		{name: "prompt logprobs", method: "POST", path: text, body: `{"model":"tiny","prompt":[7,8],"prompt_logprobs":1,"return_token_ids":true,"stream":true,"max_tokens":1}`},
	}
}

func responsesTable() []exchange {
	path := "/v1/responses"
	search := `{"type":"function","name":"search","description":"Find pages.","parameters":{"type":"object"},"strict":true}`
	return []exchange{
		{name: "response", method: "POST", path: path, body: `{"model":"tiny","input":"hi","instructions":"be brief"}`},
		{name: "streamed response", method: "POST", path: path, body: `{"model":"tiny","input":"hi","stream":true,"max_output_tokens":2}`},
		{name: "function call", method: "POST", path: path, body: `{"model":"tiny","input":"hi","tools":[` + search + `],"tool_choice":"required","store":false}`},
		{name: "streamed function call", method: "POST", path: path, body: `{"model":"tiny","input":[{"role":"user","content":"hi"}],"tools":[` + search + `],"stream":true,"store":false}`},
		{
			name: "history", method: "POST", path: path,
			body: `{"model":"tiny","tools":[` + search + `],"reasoning":{"effort":"low"},"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]},` +
				`{"type":"reasoning","id":"rs_1","summary":[],"content":[{"type":"reasoning_text","text":"hm"}]},{"type":"function_call","call_id":"call_1","name":"search","arguments":"{}"},` +
				`{"type":"function_call","call_id":"call_2","name":"search","arguments":"{}"},` +
				`{"type":"function_call_output","call_id":"call_1","output":"no page"},{"type":"function_call_output","call_id":"call_2","output":[{"type":"input_text","text":"a page"}]},` +
				`{"role":"assistant","content":[{"type":"output_text","text":"done"}]},{"role":"user","content":"again"}]}`,
		},
		{name: "schema, logprobs, and ids", method: "POST", path: path, body: `{"model":"tiny","input":"hi","text":{"format":{"type":"json_schema","name":"a","schema":{"type":"object"}}},"include":["message.output_text.logprobs"],"top_logprobs":1,"max_output_tokens":1,"return_token_ids":true}`},
		{name: "image", method: "POST", path: path, body: `{"model":"tiny","input":[{"role":"user","content":[{"type":"input_image","image_url":"a"}]}]}`},
		{name: "hosted tool", method: "POST", path: path, body: `{"model":"tiny","input":"hi","tools":[{"type":"web_search"}]}`},
		{name: "item of another type", method: "POST", path: path, body: `{"model":"tiny","input":[{"type":"item_reference","id":"a"}]}`},
		{name: "item that is no object", method: "POST", path: path, body: `{"model":"tiny","input":[7]}`},
		{name: "no input", method: "POST", path: path, body: `{"model":"tiny"}`},
		{name: "empty input", method: "POST", path: path, body: `{"model":"tiny","input":[]}`},
		{name: "call without a name", method: "POST", path: path, body: `{"model":"tiny","input":[{"type":"function_call","call_id":"a"}]}`},
		{name: "unknown previous response", method: "POST", path: path, body: `{"model":"tiny","input":"hi","previous_response_id":"resp_x"}`},
		{name: "background", method: "POST", path: path, body: `{"model":"tiny","input":"hi","background":true}`},
		{name: "context overflow", method: "POST", path: path, body: `{"model":"tiny","input":"hi","max_output_tokens":100}`},
		{name: "zero tokens", method: "POST", path: path, body: `{"model":"tiny","input":"hi","max_output_tokens":0}`},
		{name: "unknown response", method: "GET", path: path + "/resp_x"},
		{name: "unknown response to delete", method: "DELETE", path: path + "/resp_x"},
		{name: "unknown response with input", method: "GET", path: path + "/resp_x/input_items"},
	}
}

func anthropicTable() []exchange {
	path := "/v1/messages"
	hello := `"model":"tiny","max_tokens":9,"messages":[{"role":"user","content":"hi"}]`
	search := `{"name":"search","description":"Find pages.","input_schema":{"type":"object", "properties":{}}}`
	return []exchange{
		{name: "message", method: "POST", path: path, body: `{"system":[{"type":"text","text":"be brief","cache_control":{"type":"ephemeral"}}],` + hello + `}`},
		{name: "streamed message", method: "POST", path: path, body: `{"stream":true,` + hello + `}`},
		{name: "tool call", method: "POST", path: path, body: `{"tools":[` + search + `],"tool_choice":{"type":"any","disable_parallel_tool_use":true},` + hello + `}`},
		{name: "streamed tool call", method: "POST", path: path, body: `{"stream":true,"return_token_ids":true,"tools":[` + search + `],"tool_choice":{"type":"tool","name":"search"},` + hello + `}`},
		{
			name: "history with tools", method: "POST", path: path,
			body: `{"model":"tiny","max_tokens":9,"tools":[` + search + `],"tool_choice":{"type":"none"},"thinking":{"type":"enabled","budget_tokens":1024},"messages":[{"role":"user","content":"hi"},` +
				`{"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":""},{"type":"text","text":"I search."},{"type":"tool_use","id":"toolu_1","name":"search","input":{"q": 1}}]},` +
				`{"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_1","content":[{"type":"text","text":"no page"}]},{"type":"tool_result","tool_use_id":"toolu_2"},{"type":"text","text":"and?"}]}]}`,
		},
		{name: "prefill, sampling, and ids", method: "POST", path: path, body: `{"model":"tiny","max_tokens":9,"temperature":0.5,"top_p":0.9,"top_k":5,"stop_sequences":[" three"],"return_token_ids":true,"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"o"}]}`},
		{name: "schema", method: "POST", path: path, body: `{"output_config":{"effort":"low","format":{"type":"json_schema","schema":{"type":"object"}}},` + hello + `}`},
		{name: "token limit", method: "POST", path: path, body: `{"model":"tiny","max_tokens":100,"messages":[{"role":"user","content":"hi"}]}`},
		{name: "count", method: "POST", path: path + "/count_tokens", body: `{"model":"tiny","messages":[{"role":"user","content":"hi"}]}`},
		{name: "count of no messages", method: "POST", path: path + "/count_tokens", body: `{"model":"tiny"}`},
		{name: "parameter that the engine does not support", method: "POST", path: path, body: `{"logit_bias":{"5":1,"6":1},` + hello + `}`},
		{name: "session in the URL", method: "POST", path: "/sessions/a" + path, body: `{` + hello + `}`},
		{name: "no limit", method: "POST", path: path, body: `{"model":"tiny","messages":[{"role":"user","content":"hi"}]}`},
		{name: "no messages", method: "POST", path: path, body: `{"model":"tiny","max_tokens":1}`},
		{name: "no model", method: "POST", path: path, body: `{"max_tokens":1,"messages":[{"role":"user","content":"hi"}]}`},
		{name: "unknown model", method: "POST", path: path, body: `{"model":"x","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}`},
		{name: "image", method: "POST", path: path, body: `{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image","source":{}}]}]}`},
		{name: "bad role", method: "POST", path: path, body: `{"model":"tiny","max_tokens":1,"messages":[{"role":"robot","content":"hi"}]}`},
		{name: "content of another type", method: "POST", path: path, body: `{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":7}]}`},
		{name: "empty content", method: "POST", path: path, body: `{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":[]}]}`},
		{name: "calls without results", method: "POST", path: path, body: `{"model":"tiny","max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"search"}]}]}`},
		{name: "hot", method: "POST", path: path, body: `{"temperature":1.5,` + hello + `}`},
		{name: "too many stop sequences", method: "POST", path: path, body: `{"stop_sequences":[` + strings.Repeat(`"a",`, 16) + `"a"],` + hello + `}`},
		{name: "server tool", method: "POST", path: path, body: `{"tools":[{"type":"web_search_20250305","name":"web_search"}],` + hello + `}`},
		{name: "unknown choice", method: "POST", path: path, body: `{"tool_choice":{"type":"maybe"},` + hello + `}`},
		{name: "choice without tools", method: "POST", path: path, body: `{"tool_choice":{"type":"any"},` + hello + `}`},
		{name: "wrong method", method: "GET", path: path},
		{name: "broken JSON", method: "POST", path: path, body: `{`},
	}
}

func vllmTable() []exchange {
	generate, tokenize, detokenize := "/inference/v1/generate", "/tokenize", "/detokenize"
	return []exchange{
		{name: "text to tokens", method: "POST", path: tokenize, body: `{"model":"tiny","prompt":"hi"}`},
		{name: "text to tokens with texts", method: "POST", path: tokenize, body: `{"prompt":"hi","return_token_strs":true}`},
		{name: "chat to tokens", method: "POST", path: tokenize, body: `{"model":"tiny","messages":[{"role":"user","content":"hi"}],"add_generation_prompt":true}`},
		{name: "neither text nor chat", method: "POST", path: tokenize, body: `{"model":"tiny"}`},
		{name: "text and chat", method: "POST", path: tokenize, body: `{"prompt":"hi","messages":[{"role":"user","content":"hi"}]}`},
		{name: "text without special tokens", method: "POST", path: tokenize, body: `{"prompt":"hi","add_special_tokens":false}`},
		{name: "chat with special tokens", method: "POST", path: tokenize, body: `{"messages":[{"role":"user","content":"hi"}],"add_special_tokens":true}`},
		{name: "unknown model of a text", method: "POST", path: tokenize, body: `{"model":"x","prompt":"hi"}`},
		{name: "tokens to text", method: "POST", path: detokenize, body: `{"model":"tiny","tokens":[104,105]}`},
		{name: "no tokens to text", method: "POST", path: detokenize, body: `{"model":"tiny","tokens":[]}`},
		{name: "tokens are missing", method: "POST", path: detokenize, body: `{"model":"tiny"}`},
		{name: "tokens that are texts", method: "POST", path: detokenize, body: `{"tokens":["a"]}`},
		{name: "unknown token", method: "POST", path: detokenize, body: `{"tokens":[999]}`},
		{
			name: "generate", method: "POST", path: generate,
			body: `{"model":"tiny","token_ids":[7,8],"sampling_params":{"n":2,"temperature":1.0,"logprobs":1,"max_tokens":2,"stop_token_ids":[3],"skip_special_tokens":false,"seed":1}}`,
		},
		{name: "streamed generate", method: "POST", path: generate, body: `{"request_id":"a","token_ids":[7,8],"sampling_params":{"logprobs":0,"max_tokens":2},"stream":true,"stream_options":{"include_usage":true}}`},
		{name: "prompt logprobs", method: "POST", path: generate, body: `{"token_ids":[7,8],"sampling_params":{"prompt_logprobs":1,"max_tokens":0},"return_token_ids":true}`},
		{name: "session of generate", method: "POST", path: generate, body: `{"token_ids":[7,8],"sampling_params":{"max_tokens":1}}`, headers: "X-Session-ID: a\n"},
		{name: "no token ids", method: "POST", path: generate, body: `{"sampling_params":{}}`},
		{name: "too many logprobs", method: "POST", path: generate, body: `{"token_ids":[7],"sampling_params":{"logprobs":21}}`},
		{name: "images", method: "POST", path: generate, body: `{"token_ids":[7],"features":{"mm_hashes":{}}}`},
		{name: "unknown token id", method: "POST", path: generate, body: `{"token_ids":[9999]}`},
		{name: "wrong method", method: "GET", path: generate},
	}
}

func sglangTable() []exchange {
	path := "/generate"
	return []exchange{
		{name: "text", method: "POST", path: path, body: `{"text":"hi","sampling_params":{"temperature":0.5,"max_new_tokens":2,"stop":["x"],"repetition_penalty":1.1,"min_new_tokens":1,"sampling_seed":3,"ignore_eos":true}}`},
		{name: "token ids with logprobs", method: "POST", path: path, body: `{"rid":"a","input_ids":[7,8],"sampling_params":{"max_new_tokens":2},"return_logprob":true}`},
		{name: "logprobs of the prompt", method: "POST", path: path, body: `{"input_ids":[7,8],"sampling_params":{"max_new_tokens":0},"return_logprob":true,"logprob_start_len":0,"top_logprobs_num":1,"return_text_in_logprobs":true}`},
		{name: "batch", method: "POST", path: path, body: `{"rid":["a","b"],"text":["x","y"],"sampling_params":[{"max_new_tokens":1},{"max_new_tokens":1}],"return_logprob":[false,false]}`},
		{name: "n", method: "POST", path: path, body: `{"text":"x","sampling_params":{"max_new_tokens":1,"n":2}}`},
		{name: "stop string", method: "POST", path: path, body: `{"text":"x","sampling_params":{"stop":" three"},"image_data":[[]]}`},
		{name: "schema", method: "POST", path: path, body: `{"text":"x","sampling_params":{"max_new_tokens":1,"json_schema":"{\"type\":\"object\"}"}}`},
		{name: "stream", method: "POST", path: path, body: `{"input_ids":[7,8],"sampling_params":{"max_new_tokens":2},"stream":true,"return_logprob":true}`},
		{name: "streamed batch in a session", method: "POST", path: path, body: `{"session_id":"a","text":["x","y"],"sampling_params":{"max_new_tokens":1},"stream":true}`},
		{name: "no prompt", method: "POST", path: path, body: `{}`},
		{name: "two prompts", method: "POST", path: path, body: `{"text":"x","input_ids":[1]}`},
		{name: "image", method: "POST", path: path, body: `{"text":"x","image_data":["a.png"]}`},
		{name: "different parameters", method: "POST", path: path, body: `{"text":["x","y"],"sampling_params":[{"max_new_tokens":1},{"max_new_tokens":2}]}`},
		{name: "too few parameters", method: "POST", path: path, body: `{"text":["x","y"],"sampling_params":[{"max_new_tokens":1}]}`},
		{name: "negative tokens", method: "POST", path: path, body: `{"text":"x","sampling_params":{"max_new_tokens":-1}}`},
		{name: "no tokens", method: "POST", path: path, body: `{"text":"x","sampling_params":{"max_new_tokens":0}}`},
		{name: "hidden states", method: "POST", path: path, body: `{"text":"x","return_hidden_states":true}`},
		{name: "logprob of another type", method: "POST", path: path, body: `{"text":"x","return_logprob":"yes"}`},
		{name: "sampling of another type", method: "POST", path: path, body: `{"text":"x","sampling_params":7}`},
		{name: "context overflow", method: "POST", path: path, body: `{"text":"x","sampling_params":{"max_new_tokens":100}}`},
		{name: "unknown token", method: "POST", path: path, body: `{"input_ids":[9999]}`},
		{name: "wrong method", method: "GET", path: path},
	}
}
