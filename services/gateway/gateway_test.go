package gateway_test

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/apikey"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

var update = flag.Bool("update", false, "update the golden files")

func do(t *testing.T, s *gateway.Server, method, path, body, key string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.URL()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	return send(t, http.DefaultClient, req)
}

// send sends a request and reads the whole response.
func send(t *testing.T, client *http.Client, req *http.Request) (*http.Response, string) {
	t.Helper()
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(raw)
}

// TestBadRequests compares the responses with testdata/bad_requests.golden.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	chat, text := "/v1/chat/completions", "/v1/completions"
	hello := `"messages":[{"role":"user","content":"hi"}]`
	cases := []struct{ name, method, path, body string }{
		{"unknown model", "POST", chat, `{"model":"gpt-4",` + hello + `}`},
		{"no model", "POST", chat, `{` + hello + `}`},
		{"bad role", "POST", chat, `{"model":"tiny","messages":[{"role":"robot","content":"hi"}]}`},
		{"no messages", "POST", chat, `{"model":"tiny","messages":[]}`},
		{"message without content", "POST", chat, `{"model":"tiny","messages":[{"role":"user"}]}`},
		{"message of another type", "POST", chat, `{"model":"tiny","messages":[{"role":"user","content":7}]}`},
		{"image", "POST", chat, `{"model":"tiny","messages":[{"role":"user","content":[{"type":"image_url"}]}]}`},
		{"negative temperature", "POST", chat, `{"model":"tiny","temperature":-1,` + hello + `}`},
		{"temperature as text", "POST", chat, `{"model":"tiny","temperature":"hot",` + hello + `}`},
		{"top_p of zero", "POST", chat, `{"model":"tiny","top_p":0,` + hello + `}`},
		{"zero completions", "POST", chat, `{"model":"tiny","n":0,` + hello + `}`},
		{"too many completions", "POST", chat, `{"model":"tiny","n":1000,` + hello + `}`},
		{"zero tokens", "POST", chat, `{"model":"tiny","max_tokens":0,` + hello + `}`},
		{"two token limits", "POST", chat, `{"model":"tiny","max_tokens":1,"max_completion_tokens":2,` + hello + `}`},
		{"context overflow", "POST", chat, `{"model":"tiny","max_tokens":100,` + hello + `}`},
		{"empty stop", "POST", chat, `{"model":"tiny","stop":["a",""],` + hello + `}`},
		{"stop of another type", "POST", chat, `{"model":"tiny","stop":3,` + hello + `}`},
		{"tool without a name", "POST", chat, `{"model":"tiny","tools":[{"type":"function"}],` + hello + `}`},
		{"tool of another type", "POST", chat, `{"model":"tiny","tools":[{"type":"retrieval"}],` + hello + `}`},
		{"choice of an unknown tool", "POST", chat, `{"model":"tiny","tools":[{"type":"function","function":{"name":"a"}}],"tool_choice":{"type":"function","function":{"name":"b"}},` + hello + `}`},
		{"required choice without tools", "POST", chat, `{"model":"tiny","tool_choice":"required",` + hello + `}`},
		{"unknown choice", "POST", chat, `{"model":"tiny","tool_choice":"maybe",` + hello + `}`},
		{"tools and functions", "POST", chat, `{"model":"tiny","tools":[{"type":"function","function":{"name":"a"}}],"functions":[{"name":"a"}],` + hello + `}`},
		{"call without a name", "POST", chat, `{"model":"tiny","messages":[{"role":"assistant","tool_calls":[{}]}]}`},
		{"call of the user", "POST", chat, `{"model":"tiny","messages":[{"role":"user","content":"a","tool_calls":[{"function":{"name":"a"}}]}]}`},
		{"continued message of the user", "POST", chat, `{"model":"tiny","continue_final_message":true,` + hello + `}`},
		{"chat template", "POST", chat, `{"model":"tiny","chat_template":"{{ x }}",` + hello + `}`},
		{"audio", "POST", chat, `{"model":"tiny","modalities":["text","audio"],` + hello + `}`},
		{"penalty", "POST", chat, `{"model":"tiny","presence_penalty":3,` + hello + `}`},
		{"penalty of vLLM", "POST", chat, `{"model":"tiny","repetition_penalty":0,` + hello + `}`},
		{"two constraints", "POST", chat, `{"model":"tiny","guided_json":{"type":"object"},"response_format":{"type":"json_object"},` + hello + `}`},
		{"schema of another type", "POST", chat, `{"model":"tiny","guided_json":7,` + hello + `}`},
		{"beam search", "POST", text, `{"model":"tiny","prompt":"a","use_beam_search":true}`},
		{"logit bias", "POST", chat, `{"model":"tiny","logit_bias":{"x":1},` + hello + `}`},
		{"large logit bias", "POST", chat, `{"model":"tiny","logit_bias":{"5":101},` + hello + `}`},
		{"negative stop token", "POST", text, `{"model":"tiny","prompt":"a","stop_token_ids":[-1]}`},
		{"more tokens at least than at most", "POST", text, `{"model":"tiny","prompt":"a","min_tokens":3,"max_tokens":2}`},
		{"top logprobs without logprobs", "POST", chat, `{"model":"tiny","top_logprobs":5,` + hello + `}`},
		{"too many top logprobs", "POST", chat, `{"model":"tiny","logprobs":true,"top_logprobs":21,` + hello + `}`},
		{"JSON schema without a schema", "POST", chat, `{"model":"tiny","response_format":{"type":"json_schema"},` + hello + `}`},
		{"unknown response format", "POST", chat, `{"model":"tiny","response_format":{"type":"xml"},` + hello + `}`},
		{"session with a space", "POST", chat, `{"model":"tiny","session_id":"a b",` + hello + `}`},
		{"two sessions", "POST", "/sessions/a" + chat, `{"model":"tiny","session_id":"b",` + hello + `}`},
		{"negative version", "POST", chat, `{"model":"tiny","weights_version":-1,` + hello + `}`},
		{"stream options without a stream", "POST", chat, `{"model":"tiny","stream_options":{"include_usage":true},` + hello + `}`},
		{"broken JSON", "POST", chat, "{\"model\":\"tiny\",\n  \"messages\":[}"},
		{"list instead of object", "POST", chat, `[1]`},
		{"no body", "POST", chat, ``},
		{"no prompt", "POST", text, `{"model":"tiny"}`},
		{"prompt of another type", "POST", text, `{"model":"tiny","prompt":{"a":1}}`},
		{"empty tokens", "POST", text, `{"model":"tiny","prompt":[[]]}`},
		{"logprobs of too many tokens", "POST", text, `{"model":"tiny","prompt":"a","logprobs":21}`},
		{"zero tokens of a text", "POST", text, `{"model":"tiny","prompt":"a","max_tokens":0}`},
		{"suffix", "POST", text, `{"model":"tiny","prompt":"a","suffix":"b"}`},
		{"negative prompt logprobs", "POST", text, `{"model":"tiny","prompt":"a","prompt_logprobs":-1}`},
		{"unknown token", "POST", text, `{"model":"tiny","prompt":[9999]}`},
		{"best_of", "POST", text, `{"model":"tiny","prompt":"a","best_of":3}`},
		{"completion overflow", "POST", text, `{"model":"tiny","prompt":"a","max_tokens":65}`},
		{"wrong method", "GET", chat, ``},
		{"unknown route", "POST", "/v1/embeddings", `{}`},
		{"one unknown model", "GET", "/v1/models/gpt-4", ``},
	}
	s, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny"})
	var got strings.Builder
	for _, c := range cases {
		resp, body := do(t, s, c.method, c.path, c.body, "")
		got.WriteString("# " + c.name + "\n" + c.method + " " + c.path + " " + c.body + "\n" + resp.Status + "\n" + body + "\n")
	}
	golden(t, filepath.Join("testdata", "bad_requests.golden"), got.String())
}

func TestPlainChat(t *testing.T) {
	t.Parallel()
	worker := &fakeWorker{model: "tiny"}
	s, store := serve(t, gateway.Config{}, worker)
	resp, body := do(t, s, "POST", "/v1/chat/completions", `{"model":"tiny","n":2,"seed":3,"stop":"x","logprobs":true,
		"messages":[{"role":"developer","content":"be brief"},{"role":"user","content":[{"type":"text","text":"hi"}]}]}`, "")
	var got struct {
		Object  string
		Choices []struct {
			Index    int
			Message  struct{ Role, Content string }
			Reason   string `json:"finish_reason"`
			Logprobs struct {
				Content []struct {
					Token   string
					Logprob float64
				}
			}
		}
		Usage       map[string]int
		Fingerprint string `json:"system_fingerprint"`
	}
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	if len(got.Choices) != 2 || got.Choices[1].Message.Content != "one two three" || got.Choices[1].Reason != "stop" ||
		got.Usage["prompt_tokens"] != 2 || got.Usage["completion_tokens"] != 6 || got.Usage["total_tokens"] != 8 {
		t.Fatalf("got %s", body)
	}
	if scored := got.Choices[0].Logprobs.Content; len(scored) != 3 || scored[1].Token != " two" || scored[1].Logprob != -0.25 {
		t.Fatalf("logprobs in %s", body)
	}
	if got.Fingerprint != "weights-v12" || resp.Header.Get("x-rollout-weights-version") != "12" {
		t.Fatalf("weights: %s, %s", got.Fingerprint, resp.Header.Get("x-rollout-weights-version"))
	}
	session, err := store.Session(t.Context(), resp.Header.Get("x-rollout-session"), 0)
	tree := session.GetSegments()
	if err != nil || len(tree) != 3 || tree[0].GetSegment().GetTokens() != 2 || tree[1].GetSegment().GetTokens() != 3 ||
		len(tree[1].GetSegment().GetVersionSpans()) != 2 || tree[1].GetText() != "one two three" || tree[2].GetFinishReason() != "stop" {
		t.Fatalf("the ledger has %v, %v", session, err)
	}
	sent := worker.last
	if sent.GetParams().GetSeed() != 3 || sent.GetParams().GetStop()[0] != "x" || sent.GetPrompts()[0].GetChat().GetMessages()[0].GetRole() != "system" {
		t.Fatalf("the worker was sent %v", sent)
	}
}

func TestStreamedCompletion(t *testing.T) {
	t.Parallel()
	s, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny"})
	resp, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":["a","b"],"stream":true,"stream_options":{"include_usage":true}}`, "")
	if resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("content type %s", resp.Header.Get("Content-Type"))
	}
	if version, session := resp.Header.Get("x-rollout-weights-version"), resp.Header.Get("x-rollout-session"); version != "11" || session == "" {
		t.Errorf("the headers have weights %q and session %q, want the weights of the first token", version, session)
	}
	events := strings.Split(strings.TrimSuffix(body, "\n\n"), "\n\n")
	if !strings.Contains(events[0], `"system_fingerprint":"weights-v11"`) || !strings.Contains(events[5], `"system_fingerprint":"weights-v12"`) {
		t.Errorf("weights in events %q", events)
	}
	if len(events) != 8 || events[7] != "data: [DONE]" || !strings.Contains(events[6], `"total_tokens":10`) || !strings.Contains(events[3], `"index":1`) {
		t.Fatalf("events %q", events)
	}
}

func TestStreamedOffsetsCountPerChoice(t *testing.T) {
	t.Parallel()
	s, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny"})
	_, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":["a","b"],"stream":true,"logprobs":1}`, "")
	var got []string
	for _, found := range regexp.MustCompile(`"text_offset":\[(\d+)\]`).FindAllStringSubmatch(body, -1) {
		got = append(got, found[1])
	}
	if want := []string{"0", "3", "7", "0", "3", "7"}; !slices.Equal(got, want) {
		t.Errorf("offsets %s, want %s", got, want)
	}
}

func TestDefaultValuesOfVLLMFieldsAreAccepted(t *testing.T) {
	t.Parallel()
	worker := &fakeWorker{model: "tiny"}
	s, _ := serve(t, gateway.Config{}, worker)
	defaults := `"repetition_penalty":1.0,"length_penalty":1,"use_beam_search":false,"ignore_eos":false,"min_tokens":0,"stop_token_ids":[],"guided_json":null`
	resp, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a","top_k":-1,`+defaults+`}`, "")
	if resp.StatusCode != http.StatusOK || worker.last.GetParams().TopK == nil || worker.last.GetParams().GetTopK() != 0 {
		t.Errorf("%s %s: sampled with %s", resp.Status, body, worker.last.GetParams())
	}
}

func TestFailingWorkerIsReplacedBeforeTheFirstToken(t *testing.T) {
	t.Parallel()
	s, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny", broken: true}, &fakeWorker{model: "tiny"})
	for range 4 { // whichever is picked first
		if resp, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a"}`, ""); resp.StatusCode != http.StatusOK {
			t.Fatalf("%s %s", resp.Status, body)
		}
	}
}

func TestWorkerThatExitsIsReplacedOrTheRequestIsRetryable(t *testing.T) {
	t.Parallel()
	body := `{"model":"tiny","prompt":"a"}`
	alone, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny", exits: true})
	if resp, answer := do(t, alone, "POST", "/v1/completions", body, ""); resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "1" {
		t.Errorf("%s, Retry-After %q: %s", resp.Status, resp.Header.Get("Retry-After"), answer)
	}
	two, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny", exits: true}, &fakeWorker{model: "tiny"})
	for range 4 {
		if resp, answer := do(t, two, "POST", "/v1/completions", body, ""); resp.StatusCode != http.StatusOK {
			t.Errorf("%s %s", resp.Status, answer)
		}
	}
}

func TestFailureAfterTheFirstTokenIsReturned(t *testing.T) {
	t.Parallel()
	s, store := serve(t, gateway.Config{}, &fakeWorker{model: "tiny", breaks: true})
	resp, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a"}`, "")
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
		t.Fatalf("%s %s", resp.Status, body)
	}
	_, body = do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a","stream":true}`, "")
	if !strings.Contains(body, `data: {"error":`) || strings.Contains(body, "[DONE]") {
		t.Fatalf("events %s", body)
	}
	if len(store.sessions) != 0 {
		t.Fatalf("an incomplete completion was stored: %v", store.sessions)
	}
}

// The details of an internal error are only in the log.
func TestInternalErrorIsLogged(t *testing.T) {
	t.Parallel()
	s, store := serve(t, gateway.Config{}, &fakeWorker{model: "tiny", bug: true})
	resp, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"x"}`, "")
	if resp.StatusCode != http.StatusInternalServerError || strings.Contains(body, "tensor") {
		t.Errorf("%s %s", resp.Status, body)
	}
	if logged := store.log.String(); !strings.Contains(logged, "a tensor of the wrong shape") {
		t.Errorf("logged %q", logged)
	}
}

func TestNoWorker(t *testing.T) {
	t.Parallel()
	s, _ := serve(t, gateway.Config{})
	resp, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a"}`, "")
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "1" || !strings.Contains(body, "no inference worker is up") {
		t.Fatalf("%s %s", resp.Status, body)
	}
}

func TestAPIKey(t *testing.T) {
	t.Parallel()
	ring, key := keyring(t, apikey.Read)
	s, _ := serve(t, gateway.Config{Keys: ring}, &fakeWorker{model: "tiny"})
	for key, want := range map[string]int{"": 401, "wrong": 401, key: 200} {
		if resp, body := do(t, s, "GET", "/v1/models", "", key); resp.StatusCode != want {
			t.Errorf("key %q: %s %s", key, resp.Status, body)
		}
	}
	resp, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a"}`, key)
	if resp.StatusCode != http.StatusForbidden || !strings.Contains(body, `"code":"insufficient_permissions"`) || !strings.Contains(body, "--scope sample") {
		t.Errorf("key with the scope read: %s %s", resp.Status, body)
	}
}

func TestLargeBody(t *testing.T) {
	t.Parallel()
	s, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny"})
	resp, body := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"`+strings.Repeat("a", 16<<20)+`"}`, "")
	if resp.StatusCode != http.StatusRequestEntityTooLarge || !strings.Contains(body, `"code":"request_too_large"`) {
		t.Fatalf("%s %s", resp.Status, body)
	}
}

func TestWorkerContinuesTheTraceOfTheCaller(t *testing.T) {
	t.Parallel()
	worker := &fakeWorker{model: "tiny"}
	s, _ := serve(t, gateway.Config{}, worker)
	const parent = "00-0102030405060708090a0b0c0d0e0f10-0102030405060708-01"
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/completions", strings.NewReader(`{"model":"tiny","prompt":"a"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("traceparent", parent)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if got := worker.trace(); got != parent[3:35] {
		t.Errorf("trace %q", got)
	}
}

func TestDisconnectedCallerAbortsTheRequest(t *testing.T) {
	t.Parallel()
	worker := &fakeWorker{model: "tiny", endless: true, aborted: make(chan struct{})}
	s, _ := serve(t, gateway.Config{}, worker)
	ctx, disconnect := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/completions", strings.NewReader(`{"model":"tiny","prompt":"a","stream":true}`))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	disconnect()
	select {
	case <-worker.aborted:
	case <-time.After(time.Minute):
		t.Fatal("the worker continues sampling")
	}
}

func TestModelsOfTwoRuns(t *testing.T) {
	t.Parallel()
	s, _ := serve(t, gateway.Config{}, &fakeWorker{model: "a"}, &fakeWorker{model: "b"})
	listed, err := s.ListModels(t.Context(), &gatewayv1.ListModelsRequest{})
	if err != nil || len(listed.GetModels()) != 2 || listed.GetModels()[1].GetName() != "b" || listed.GetModels()[1].GetWeightsVersion() != 12 {
		t.Fatalf("got %v, %v", listed, err)
	}
	if proto.Equal(listed.GetModels()[0], listed.GetModels()[1]) {
		t.Fatal("both models are equal")
	}
	for name, want := range map[string]int{"a": 200, "run-b": 200, "c": 404} {
		if resp, body := do(t, s, "POST", "/v1/completions", `{"model":"`+name+`","prompt":"x"}`, ""); resp.StatusCode != want {
			t.Errorf("%s: %s %s", name, resp.Status, body)
		}
	}
}

func TestOldSessionsExpire(t *testing.T) {
	t.Parallel()
	_, store := serve(t, gateway.Config{})
	if got, want := <-store.expired, time.Unix(1_700_000_000, 0).AddDate(0, 0, -7); !got.Equal(want) {
		t.Errorf("sessions before %v expire, want before %v", got, want)
	}
}

// A registration without a valid proof gets no request and is not listed, also if it claims the
// newest incarnation of a run.
func TestProcessesThatTheSchedulerDidNotLaunchAreIgnored(t *testing.T) {
	t.Parallel()
	intruder, other := &fakeWorker{model: "tiny", intruder: true}, &fakeWorker{model: "other", intruder: true}
	s, _ := serve(t, gateway.Config{}, intruder, &fakeWorker{model: "tiny"}, other)
	for range 4 {
		if resp, answer := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a"}`, ""); resp.StatusCode != http.StatusOK {
			t.Fatalf("%s %s", resp.Status, answer)
		}
	}
	if resp, _ := do(t, s, "POST", "/v1/completions", `{"model":"other","prompt":"a"}`, ""); resp.StatusCode != http.StatusNotFound {
		t.Errorf("the model of a process that was not launched is served: %s", resp.Status)
	}
	for _, w := range []*fakeWorker{intruder, other} {
		w.mu.Lock()
		if w.asked || w.last != nil {
			t.Error("a process that was not launched was called")
		}
		w.mu.Unlock()
	}
}
