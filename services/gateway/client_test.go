package gateway_test

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/services/gateway"
)

// TestOfficialClient runs OpenAI's Python client against a gateway. It comes with the development environment (make venv-dev).
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
		"errors": map[string]any{
			"unknown model":        "NotFoundError 404 model_not_found",
			"bad role":             "BadRequestError 400 invalid_value",
			"negative temperature": "BadRequestError 400 invalid_value",
			"context overflow":     "BadRequestError 400 context_length_exceeded",
			"echo":                 "BadRequestError 400 unsupported_parameter",
			"wrong key":            "AuthenticationError 401 invalid_api_key",
		},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
