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
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/apikey/apikeytest"
	"github.com/rollout-rl/rollout/services/gateway"
)

// endpoints are the endpoints with a body, and a body that each accepts.
var endpoints = map[string]string{
	"/v1/chat/completions":                 `{"model":"tiny","messages":[{"role":"user","content":"hi"}]}`,
	"/v1/completions":                      `{"model":"tiny","prompt":"a"}`,
	"/v1/responses":                        `{"model":"tiny","input":"a"}`,
	"/v1/messages":                         `{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}`,
	"/v1/messages/count_tokens":            `{"model":"tiny","messages":[{"role":"user","content":"hi"}]}`,
	"/sessions/a/v1/chat/completions":      `{"model":"tiny","messages":[{"role":"user","content":"hi"}]}`,
	"/sessions/a/v1/messages":              `{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}`,
	"/tokenize":                            `{"prompt":"a"}`,
	"/detokenize":                          `{"tokens":[1]}`,
	"/generate":                            `{"text":"a"}`,
	"/inference/v1/generate":               `{"token_ids":[1]}`,
	"/v1/sessions/a/close":                 `{"reward":1}`,
	"/v1/rollout/prompts":                  `{}`,
	"/sessions/a/inference/v1/generate":    `{"token_ids":[1]}`,
	"/sessions/a/v1/messages/count_tokens": `{"model":"tiny","messages":[{"role":"user","content":"hi"}]}`,
}

// refusal is an error in the shapes of OpenAI and of Anthropic.
type refusal struct {
	Type  string // "error" in Anthropic's
	Error struct {
		Message, Type, Code, Reason string
	}
}

// checkRefusal fails the test unless a response is an error in the shape of the dialect of the
// path.
func checkRefusal(t *testing.T, path string, status int, body string, want int, code, anthropic string) {
	t.Helper()
	var got refusal
	if err := json.Unmarshal([]byte(body), &got); err != nil || status != want || got.Error.Message == "" || got.Error.Reason == "" {
		t.Errorf("%s: %d, want %d: %s", path, status, want, body)
		return
	}
	if strings.Contains(path, "/v1/messages") {
		if got.Type != "error" || got.Error.Type != anthropic {
			t.Errorf("%s: want an error of the type %s: %s", path, anthropic, body)
		}
		return
	}
	if got.Error.Code != code || got.Error.Type == "" {
		t.Errorf("%s: want the code %s: %s", path, code, body)
	}
}

// Every endpoint refuses bad requests with an error in the shape of its dialect.
func TestEveryEndpointRefusesInItsDialect(t *testing.T) {
	t.Parallel()
	keys, past := apikeytest.New(t), time.Now().Add(-time.Hour)
	create := func(r *apikey.Record) string { return keys.Create(t, r, past.Add(-time.Hour)) }
	expired := create(&apikey.Record{Name: "expired", Scope: "session", Expires: timestamppb.New(past)})
	read, session := create(&apikey.Record{Name: "read", Scope: "read"}), create(&apikey.Record{Name: "session", Scope: "session"})
	few := create(&apikey.Record{Name: "few", Scope: "session", RequestsPerMinute: 1})
	s, _ := serve(t, gateway.Config{Keys: keys.Ring}, &fakeWorker{model: "tiny"})
	if resp, body := do(t, s, http.MethodPost, "/v1/completions", endpoints["/v1/completions"], few); resp.StatusCode != http.StatusOK {
		t.Fatalf("the first request of the minute: %s", body)
	}
	samples := func(path string) bool {
		return !strings.Contains(path, "token") && !strings.HasSuffix(path, "/close") && !strings.HasSuffix(path, "/prompts")
	}
	large := `{"model":"tiny","prompt":"` + strings.Repeat("a", 16<<20) + `"}`
	for path, body := range endpoints {
		t.Run(path, func(t *testing.T) {
			for _, c := range []struct {
				name, key, body string
				status          int
				code, anthropic string
			}{
				{"no key", "", body, 401, "invalid_api_key", "authentication_error"},
				{"a wrong key", "rk-wrong", body, 401, "invalid_api_key", "authentication_error"},
				{"an expired key", expired, body, 401, "invalid_api_key", "authentication_error"},
				{"a key out of scope", read, body, 403, "insufficient_permissions", "permission_error"},
				{"no JSON", session, `{"model":`, 400, "invalid_json", "invalid_request_error"},
				{"a list", session, `[1]`, 400, "invalid_json", "invalid_request_error"},
				{"no body", session, ``, 400, "invalid_json", "invalid_request_error"},
				{"an oversized body", session, large, 413, "request_too_large", "request_too_large"},
				{"a key over its limit", few, body, 429, "rate_limit_exceeded", "rate_limit_error"},
			} {
				if c.status == 429 && !samples(path) || strings.HasSuffix(path, "/prompts") && c.body == "" {
					continue // only completions are limited, and a request for prompts needs no body
				}
				resp, got := do(t, s, http.MethodPost, path, c.body, c.key)
				checkRefusal(t, path+" with "+c.name, resp.StatusCode, got, c.status, c.code, c.anthropic)
				if (c.status == 429) != (resp.Header.Get("Retry-After") != "") || (c.status == 401) != (resp.Header.Get("WWW-Authenticate") != "") {
					t.Errorf("%s with %s: headers %v", path, c.name, resp.Header)
				}
			}
			resp, got := do(t, s, http.MethodDelete, path, body, session)
			checkRefusal(t, path+" with DELETE", resp.StatusCode, got, http.StatusMethodNotAllowed, "method_not_supported", "invalid_request_error")
		})
	}
}

// A body that stops in the middle ends with an error in the shape of the dialect, with and without
// a length, and the connection is closed.
func TestEveryEndpointRefusesASlowBody(t *testing.T) {
	t.Parallel()
	s, _ := serve(t, gateway.Config{BodyTimeout: 100 * time.Millisecond}, &fakeWorker{model: "tiny"})
	for path := range endpoints {
		for _, length := range []string{"Content-Length: 100\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"} {
			t.Run(path, func(t *testing.T) {
				t.Parallel()
				conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = conn.Close() }()
				_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: localhost\r\n%s", path, length)
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(resp.Body)
				if err != nil || resp.Body.Close() != nil {
					t.Fatal(err)
				}
				checkRefusal(t, path, resp.StatusCode, string(body), http.StatusRequestTimeout, "request_timeout", "timeout_error")
				if _, err := conn.Read(make([]byte, 1)); err == nil {
					t.Error("the connection stays open")
				}
			})
		}
	}
}
