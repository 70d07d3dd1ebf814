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

// TestOfficialClient runs OpenAI's Python client against a gateway. `make venv-dev` installs the
// client.
func TestOfficialClient(t *testing.T) {
	t.Parallel()
	ring, key := keyring(t, apikey.Submit)
	s, _ := serve(t, gateway.Config{Keys: ring}, &fakeWorker{model: "tiny"})
	python, err := filepath.Abs("../../.venv/bin/python")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), python, filepath.Join("testdata", "client.py"), s.URL()+"/v1", key)
	var log bytes.Buffer
	cmd.Stderr = &log
	raw, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s (`make venv-dev` installs the client)", err, log.String())
	}
	var got any
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
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
