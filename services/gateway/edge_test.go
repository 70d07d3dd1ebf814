package gateway_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/services/gateway"
)

// A page in a browser must not reach the gateway by a name that it resolves to this host.
func TestLoopbackRefusesOtherHostsAndOrigins(t *testing.T) {
	t.Parallel()
	ring, key := keyring(t, apikey.Submit)
	open, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny"})
	trusting, _ := serve(t, gateway.Config{Keys: ring, TrustOwner: true}, &fakeWorker{model: "tiny"})
	for _, c := range []struct {
		name, host, origin, key string
		server                  *gateway.Server
		want                    int
	}{
		{"this host", "", "", "", open, 200},
		{"localhost", "localhost:1", "", "", open, 200},
		{"a name below localhost", "a.localhost", "", "", open, 200},
		{"IPv6", "[::1]:80", "http://[::1]:3000", "", open, 200},
		{"another host", "evil.example", "", "", open, 403},
		{"an address of another host", "192.0.2.1:80", "", "", open, 403},
		{"a page of this host", "", "http://localhost:3000", "", open, 200},
		{"a page of another host", "", "https://evil.example", "", open, 403},
		{"a page without an origin", "", "null", "", open, 403},
		{"another host with a key", "gateway.example", "https://app.example", key, trusting, 200},
		{"another host that the owner's browser reached", "evil.example", "", "", trusting, 403},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, path := range []string{"/v1/chat/completions", "/v1/messages"} {
				body := `{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}`
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.server.URL()+path, strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				req.Host = c.host
				if c.origin != "" {
					req.Header.Set("Origin", c.origin)
				}
				if c.key != "" {
					req.Header.Set("x-api-key", c.key)
				}
				if resp, got := send(t, http.DefaultClient, req); resp.StatusCode != c.want || c.want == 403 && !strings.Contains(got, "NOT_ALLOWED") {
					t.Errorf("%s: %s %s", path, resp.Status, got)
				}
			}
		})
	}
}

// A client that sends its body slowly gets an error and holds no connection.
func TestSlowBody(t *testing.T) {
	t.Parallel()
	s, _ := serve(t, gateway.Config{BodyTimeout: 50_000_000}, &fakeWorker{model: "tiny"})
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, _ = fmt.Fprint(conn, "POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.Body.Close() != nil || resp.StatusCode != http.StatusRequestTimeout || !strings.Contains(string(body), `"type":"timeout_error"`) {
		t.Errorf("%s %s, %v", resp.Status, body, err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the connection stays open")
	}
}

// The deadline of a body does not end a long response.
func TestSlowResponseAfterTheBodyTimeout(t *testing.T) {
	t.Parallel()
	worker := &fakeWorker{model: "tiny", resume: make(chan struct{})}
	s, _ := serve(t, gateway.Config{BodyTimeout: 50_000_000}, worker)
	body := open(t, s)
	// Longer than the timeout of a body, because another request needs as long to fail.
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, _ = fmt.Fprint(conn, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
	if _, err := io.ReadAll(conn); err != nil {
		t.Fatal(err)
	}
	close(worker.resume)
	if rest, err := io.ReadAll(body); err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("%s, %v", rest, err)
	}
}

func TestDocsListEveryEndpoint(t *testing.T) {
	t.Parallel()
	ring, _ := keyring(t, apikey.Read)
	s, _ := serve(t, gateway.Config{Keys: ring})
	_, raw := do(t, s, "GET", "/openapi.json", "", "")
	var doc struct {
		OpenAPI string
		Paths   map[string]map[string]struct {
			Summary     string
			RequestBody struct {
				Content map[string]struct {
					Schema struct {
						Properties map[string]struct{ Type string }
					}
				}
			}
		}
	}
	if err := json.Unmarshal([]byte(raw), &doc); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{
		"/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize",
		"/detokenize", "/generate", "/inference/v1/generate", "/health", "/sessions/{session}/v1/messages",
	} {
		if doc.Paths[path] == nil {
			t.Errorf("%s is missing", path)
		}
		for method, op := range doc.Paths[path] {
			if op.Summary == "" || method == "post" && op.RequestBody.Content["application/json"].Schema.Properties["model"].Type != "string" {
				t.Errorf("%s %s: %+v", method, path, op)
			}
		}
	}
	resp, page := do(t, s, "GET", "/docs", "", "")
	if resp.StatusCode != http.StatusOK || !strings.Contains(page, "<code>/v1/messages</code>") || !strings.Contains(page, "<code>stop_sequences</code></td><td>array of string") {
		t.Errorf("%s %.2000s", resp.Status, page)
	}
	if strings.Contains(page, "src=") || strings.Contains(page, "http://") || strings.Contains(page, "https://") {
		t.Error("the page needs other hosts")
	}
}

// A failure after the first token is the last event of a stream, in the shape of its dialect.
func TestFailureInAStream(t *testing.T) {
	t.Parallel()
	s, store := serve(t, gateway.Config{}, &fakeWorker{model: "tiny", breaks: true})
	chat := `{"model":"tiny","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"hi"}]}`
	for _, c := range []struct{ path, body, want string }{
		{"/v1/chat/completions", chat, `data: {"error":{"message":`},
		{"/v1/completions", `{"model":"tiny","stream":true,"prompt":"a"}`, `data: {"error":{"message":`},
		{"/v1/responses", `{"model":"tiny","stream":true,"input":"a"}`, "event: error\ndata: {\"code\":\"service_unavailable\""},
		{"/v1/messages", chat, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\""},
		{"/inference/v1/generate", `{"stream":true,"token_ids":[1]}`, `data: {"error":{"message":`},
		{"/generate", `{"stream":true,"text":"a"}`, `data: {"error":{"message":`},
	} {
		t.Run(c.path, func(t *testing.T) {
			resp, body := do(t, s, "POST", c.path, c.body, "")
			events := strings.Split(strings.TrimSuffix(body, "\n\n"), "\n\n")
			last := events[len(events)-1]
			if resp.StatusCode != http.StatusOK || !strings.HasPrefix(last, c.want) || !strings.Contains(last, `"reason":"`) {
				t.Errorf("%s: the last event is %s", resp.Status, last)
			}
			if request := resp.Header.Get("x-request-id"); request == "" || !strings.Contains(store.log.String(), request) {
				t.Errorf("the log does not have the request %q", request)
			}
		})
	}
}

// The page loads nothing, and its policy allows nothing but its own script and style.
func TestPlaygroundIsOnePage(t *testing.T) {
	t.Parallel()
	ring, _ := keyring(t, apikey.Read)
	s, _ := serve(t, gateway.Config{Keys: ring}, &fakeWorker{model: "tiny"})
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL()+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	page, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if err != nil || answer.StatusCode != http.StatusOK || !strings.HasPrefix(string(page), "<!doctype html>") {
		t.Fatalf("%d %v %.60s", answer.StatusCode, err, page)
	}
	for _, outside := range []string{"http:", "https:", "src=", "@import", "url("} {
		if strings.Contains(string(page), outside) {
			t.Errorf("the page has %q", outside)
		}
	}
	policy := answer.Header.Get("Content-Security-Policy")
	for _, rule := range []string{"default-src 'none'", "script-src 'sha256-", "style-src 'sha256-", "connect-src 'self'", "frame-ancestors 'none'"} {
		if !strings.Contains(policy, rule) {
			t.Errorf("the policy has no %s: %s", rule, policy)
		}
	}
	request.Host = "attacker.example"
	if answer, err = http.DefaultClient.Do(request); err != nil || answer.StatusCode != http.StatusForbidden {
		t.Errorf("another host: %v %v", answer, err)
	}
	_ = answer.Body.Close()
}
