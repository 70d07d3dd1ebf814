package gateway_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/apikey/apikeytest"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// Each dialect refuses keys in its own shape.
func TestKeysThatAreExpiredOutOfScopeOrOverTheirLimit(t *testing.T) {
	t.Parallel()
	keys, past := apikeytest.New(t), time.Now().Add(-time.Hour)
	old := keys.Create(t, &apikey.Record{Name: "old", Scope: "sample", Expires: timestamppb.New(past)}, past.Add(-time.Hour))
	read := keys.Create(t, &apikey.Record{Name: "read", Scope: "read"}, past)
	few := keys.Create(t, &apikey.Record{Name: "few", Scope: "sample", RequestsPerMinute: 1}, past)
	small := keys.Create(t, &apikey.Record{Name: "small", Scope: "session", TokensPerMinute: 4}, past)
	s, _ := serve(t, gateway.Config{Keys: keys.Ring}, &fakeWorker{model: "tiny"})
	text, messages := "/v1/completions", "/v1/messages"
	completion, message := `{"model":"tiny","prompt":"a"}`, `{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}`
	for _, c := range []struct {
		name, key, path, body string
		status                int
		want                  string
	}{
		{"wrong", "rk-wrong", text, completion, 401, `"code":"invalid_api_key"`},
		{"wrong", "rk-wrong", messages, message, 401, `"type":"authentication_error"`},
		{"expired", old, text, completion, 401, `"reason":"API_KEY_EXPIRED"`},
		{"expired", old, messages, message, 401, `"type":"authentication_error"`},
		{"out of scope", read, text, completion, 403, "--scope sample"},
		{"out of scope", read, messages, message, 403, `"type":"permission_error"`},
		{"an agent that only samples", few, "/v1/sessions/a/close", `{"reward":1}`, 403, "--scope session"},
		{"the first request", few, text, completion, 200, ""},
		{"the second request", few, text, completion, 429, `"code":"rate_limit_exceeded"`},
		{"the third request", few, messages, message, 429, `"type":"rate_limit_error"`},
		{"five tokens", small, text, completion, 200, ""},
		{"no token left", small, text, completion, 429, "limit of 4 tokens a minute"},
	} {
		resp, body := do(t, s, http.MethodPost, c.path, c.body, c.key)
		if resp.StatusCode != c.status || !strings.Contains(body, c.want) || (c.status == 429) != (resp.Header.Get("Retry-After") != "") {
			t.Errorf("%s, %s: %s, Retry-After %q: %s", c.name, c.path, resp.Status, resp.Header.Get("Retry-After"), body)
		}
	}
	if resp, body := do(t, s, http.MethodGet, "/v1/models", "", few); resp.StatusCode != http.StatusOK {
		t.Errorf("a key that may sample lists models: %s %s", resp.Status, body)
	}
	record, err := keys.Ring.Find(t.Context(), few)
	if err != nil {
		t.Fatal(err)
	}
	err = s.Complete(&gatewayv1.CompleteRequest{Prompts: textPrompts("a")}, &collected{ctx: apikey.With(t.Context(), record)})
	if e, _ := rpcerr.From(err); rpcerr.Reason(err) != "RATE_LIMITED" || e.RetryDelay() <= 0 {
		t.Errorf("over gRPC: %v", err)
	}
}
