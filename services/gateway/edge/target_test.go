package edge

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// The session of a URL replaces the id that a client sets in X-Session-ID; others must agree.
func TestSessionOfARequest(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		url, client, ours, field string
		want, problem            string
	}{
		"none":             {},
		"header":           {client: "a", want: "a"},
		"URL and client":   {url: "a", client: "b", want: "a"},
		"URL and ours":     {url: "a", ours: "b", problem: `the URL names the session "a", and the header x-rollout-session "b"; send one`},
		"URL and field":    {url: "a", field: "b", problem: `the URL names the session "a", and the field session_id "b"; send one`},
		"client and field": {client: "a", field: "b", problem: `the header X-Session-ID names the session "a", and the field session_id "b"; send one`},
		"twice the same":   {url: "a", ours: "a", field: "a", want: "a"},
	} {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.SetPathValue("session", c.url)
		r.Header.Set("X-Session-ID", c.client)
		r.Header.Set("x-rollout-session", c.ours)
		got, err := Session(r, c.field)
		problem := ""
		if err != nil {
			problem = err.Error()
		}
		if got != c.want || problem != c.problem {
			t.Errorf("%s: %q, %q", name, got, problem)
		}
	}
}
