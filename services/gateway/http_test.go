package gateway_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/services/gateway"
)

func TestHealthAsksForNoKeyAndNoWorker(t *testing.T) {
	t.Parallel()
	ring, _ := keyring(t, apikey.Read)
	s, _ := serve(t, gateway.Config{Keys: ring})
	if resp, body := do(t, s, "GET", "/health", "", ""); resp.StatusCode != http.StatusOK || body != "{\"status\":\"ok\"}\n" {
		t.Errorf("%s %s", resp.Status, body)
	}
	if resp, _ := do(t, s, "POST", "/health", "", ""); resp.StatusCode != http.StatusMethodNotAllowed || resp.Header.Get("Allow") != "GET, HEAD" {
		t.Errorf("%s, allowed is %q", resp.Status, resp.Header.Get("Allow"))
	}
}

func TestHeadIsGetWithoutTheBody(t *testing.T) {
	t.Parallel()
	ring, key := keyring(t, apikey.Read)
	s, _ := serve(t, gateway.Config{Keys: ring}, &fakeWorker{model: "tiny"})
	for path, want := range map[string]int{"/health": 200, "/v1/models": 200, "/v1/models/tiny": 200, "/v1/models/gpt-4": 404, "/v1/completions": 405} {
		if resp, body := do(t, s, "HEAD", path, "", key); resp.StatusCode != want || body != "" {
			t.Errorf("%s: %s %q", path, resp.Status, body)
		}
	}
	if resp, _ := do(t, s, "HEAD", "/v1/models", "", ""); resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("without a key: %s", resp.Status)
	}
}

func TestRequestedUsageIsNullBeforeTheLastChunk(t *testing.T) {
	t.Parallel()
	s, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny"})
	_, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a","stream":true,"stream_options":{"include_usage":true}}`, "")
	if strings.Count(body, `"usage":null`) != 3 || strings.Count(body, `"usage":{`) != 1 {
		t.Errorf("events %s", body)
	}
	if _, body = do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a","stream":true}`, ""); strings.Contains(body, "usage") {
		t.Errorf("usage was not requested: %s", body)
	}
}

func TestIntegersMayHaveAZeroFraction(t *testing.T) {
	t.Parallel()
	worker := &fakeWorker{model: "tiny"}
	s, _ := serve(t, gateway.Config{}, worker)
	resp, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a","max_tokens":2.0,"n":1e0,"seed":9007199254740993,"top_k":5.0,"logprobs":null}`, "")
	if p := worker.last.GetParams(); resp.StatusCode != http.StatusOK || p.GetMaxTokens() != 2 || p.GetSeed() != 9007199254740993 || p.GetTopK() != 5 {
		t.Errorf("%s %s: sampled with %s", resp.Status, body, p)
	}
	for sent, got := range map[string]string{"2.5": "number 2.5", `"2"`: "string", "[2]": "array", "true": "bool", "1e300": "number 1e300"} {
		resp, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a","max_tokens":`+sent+`}`, "")
		if want := "invalid type for `max_tokens`: expected an integer, got " + got; resp.StatusCode != http.StatusBadRequest || !strings.Contains(body, want) {
			t.Errorf("%s: %s %s, want %s", sent, resp.Status, body, want)
		}
	}
}

// TestRoutesThatChangeAnEngineAreNotServed lists the routes by which vLLM and SGLang pause, load
// weights, and run code.
func TestRoutesThatChangeAnEngineAreNotServed(t *testing.T) {
	t.Parallel()
	worker := &fakeWorker{model: "tiny"}
	s, _ := serve(t, gateway.Config{}, worker)
	for _, path := range []string{
		"/pause", "/resume", "/collective_rpc", "/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_checker",
		"/init_weight_transfer_engine", "/reset_prefix_cache", "/sleep", "/wake_up", "/abort_requests", "/server_info",
		"/update_weights_from_disk", "/update_weights_from_tensor", "/pause_generation", "/continue_generation", "/abort_request",
		"/flush_cache", "/release_memory_occupation", "/resume_memory_occupation",
	} {
		for _, prefix := range []string{"", "/v1", "/sessions/a"} {
			if resp, body := do(t, s, "POST", prefix+path, `{}`, ""); resp.StatusCode != http.StatusNotFound {
				t.Errorf("%s%s: %d %s", prefix, path, resp.StatusCode, body)
			}
		}
	}
}
