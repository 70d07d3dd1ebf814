package gateway_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/services/gateway"
)

// TestTeacher uses the client of [algorithm.distillation.endpoint] with a gateway: one run can be
// the teacher of another.
func TestTeacher(t *testing.T) {
	t.Parallel()
	ring, key := keyring(t, apikey.Submit)
	s, _ := serve(t, gateway.Config{Keys: ring}, &fakeWorker{model: "tiny"})
	python, err := filepath.Abs("../../.venv/bin/python")
	if err != nil {
		t.Fatal(err)
	}
	for protocol, want := range map[string]string{"echo": "[-0.5, -1.0] TEACHER_TOKENS_DIFFER", "prompt_logprobs": "[-0.5, -1.0]"} {
		cmd := exec.CommandContext(t.Context(), python, filepath.Join("testdata", "teacher.py"), s.URL()+"/v1", key, protocol)
		cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join("..", "..", "python"))
		raw, err := cmd.CombinedOutput()
		if got := strings.TrimSpace(string(raw)); err != nil || got != want {
			t.Errorf("%s: %v: %s, want %s", protocol, err, got, want)
		}
	}
}

// TestAgents runs the Python clients of OpenAI and Anthropic as agents use them.
func TestAgents(t *testing.T) {
	t.Parallel()
	ring, key := keyring(t, apikey.Submit)
	s, store := serve(t, gateway.Config{Keys: ring}, &fakeWorker{model: "tiny", remembers: true})
	got := python(t, "agents.py", s.URL(), key)
	all := "one two three"
	want := map[string]any{
		"chats": map[string]any{
			"call": []any{"search", `{"q":1}`, "tool_calls"}, "thought": "hm", "ids": []any{[]any{1.0, 2.0}, []any{10.0, 11.0, 12.0, 13.0}},
			"after the tool": all, "streamed call": []any{`{"q":1}`, "tool_calls"},
			"top": []any{[]any{"uno", []any{117.0, 110.0, 111.0}}, []any{`bytes:\xe2\x80`, []any{226.0, 128.0}}},
		},
		"responses": map[string]any{
			"output": []any{"reasoning", "function_call"}, "call": []any{"search", `{"q":1}`}, "continued": all, "whole": all, "streamed call": `{"q":1}`,
			"parsed": all, "stored": all, "usage": []any{2.0, 4.0, 1.0},
			"events": []any{
				"response.completed", "response.created", "response.function_call_arguments.delta", "response.function_call_arguments.done",
				"response.in_progress", "response.output_item.added", "response.output_item.done", "response.reasoning_text.delta",
				"response.reasoning_text.done",
			},
		},
		"messages": map[string]any{
			"blocks": []any{"thinking", "tool_use"}, "call": []any{"search", map[string]any{"q": 1.0}, "tool_use"}, "after the tool": all,
			"streamed call": []any{map[string]any{"q": 1.0}, "tool_use", 2.0}, "text": all, "counted": 2.0, "models": []any{"tiny"},
			"errors": map[string]any{
				"unknown model":    "NotFoundError not_found_error MODEL_NOT_FOUND",
				"context overflow": "BadRequestError invalid_request_error CONTEXT_OVERFLOW",
				"wrong key":        "AuthenticationError authentication_error INVALID_API_KEY",
			},
		},
		"bearer": all,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if _, err := store.Session(t.Context(), "an-agent", 0); err != nil {
		t.Errorf("the session of the URL: %v", err)
	}
}

// python runs a script of testdata, and returns the JSON object that it prints.
func python(t *testing.T, script string, args ...string) any {
	t.Helper()
	path, err := filepath.Abs("../../.venv/bin/python")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path, append([]string{filepath.Join("testdata", script)}, args...)...)
	var log bytes.Buffer
	cmd.Stderr = &log
	raw, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s (`make venv-dev` installs the clients)", err, log.String())
	}
	var got any
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	return got
}

// TestOfficialClient runs OpenAI's Python client against a gateway. `make venv-dev` installs the
// client.
func TestOfficialClient(t *testing.T) {
	t.Parallel()
	ring, key := keyring(t, apikey.Submit)
	s, _ := serve(t, gateway.Config{Keys: ring}, &fakeWorker{model: "tiny"})
	got := python(t, "client.py", s.URL()+"/v1", key)
	all := "one two three"
	want := map[string]any{
		"models": []any{"tiny"}, "one": "tiny",
		"chat": []any{all, all}, "finish": "stop", "usage": []any{2.0, 6.0, 8.0}, "fingerprint": "weights-v12", "version": "12",
		"logprobs": []any{[]any{"one", -0.25}, []any{" two", -0.25}, []any{" three", -0.25}},
		"deltas":   []any{"one", " two", " three"}, "stream usage": 5.0,
		"texts": []any{all, all}, "streamed": all,
		"echoed": []any{"ab" + all, "ab" + all, "cd" + all, "cd" + all},
		"echoed logprobs": map[string]any{
			"tokens": []any{"t1", "t2", "one", " two", " three"}, "token_logprobs": []any{nil, -0.5, -0.25, -0.25, -0.25},
			"top_logprobs": []any{
				nil, map[string]any{"t2": -0.5, "uno": -0.125}, map[string]any{"one": -0.25, "uno": -0.125},
				map[string]any{" two": -0.25, "uno": -0.125}, map[string]any{" three": -0.25, "uno": -0.125},
			},
			"text_offset": []any{0.0, 2.0, 4.0, 7.0, 11.0},
		},
		"prompt logprobs": []any{all, []any{nil, map[string]any{
			"8": map[string]any{"logprob": -0.5, "decoded_token": "t8"}, "20": map[string]any{"logprob": -0.125, "decoded_token": "uno", "rank": 1.0},
		}}},
		"errors": map[string]any{
			"unknown model":        "NotFoundError 404 model_not_found",
			"bad role":             "BadRequestError 400 invalid_value",
			"negative temperature": "BadRequestError 400 invalid_value",
			"context overflow":     "BadRequestError 400 context_length_exceeded",
			"suffix":               "BadRequestError 400 unsupported_parameter",
			"wrong key":            "AuthenticationError 401 invalid_api_key",
		},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
