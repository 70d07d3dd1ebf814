package registry_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rollout-rl/rollout/libs/discovery/registry"
)

// agent calls the handler without a network, so that synctest's clock rules.
type agent struct {
	t *testing.T
	h http.Handler
}

func start(t *testing.T) agent {
	r := registry.New("")
	t.Cleanup(r.Close)
	return agent{t, r.Handler()}
}

func (a agent) do(method, path, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	a.h.ServeHTTP(w, httptest.NewRequestWithContext(a.t.Context(), method, path, strings.NewReader(body)))
	return w
}

func (a agent) put(path, body string) {
	a.t.Helper()
	if w := a.do(http.MethodPut, path, body); w.Code != http.StatusOK {
		a.t.Fatalf("PUT %s: %d %s", path, w.Code, w.Body)
	}
}

// statuses gives the state of each instance's own check, by id.
func (a agent) statuses(params string) (map[string]string, string) {
	a.t.Helper()
	w := a.do(http.MethodGet, "/v1/health/service/x?"+params, "")
	var entries []struct {
		Service struct{ ID string }
		Checks  []struct{ Status, CheckID string }
	}
	if err := json.Unmarshal(w.Body.Bytes(), &entries); err != nil {
		a.t.Fatalf("%s: %v", w.Body, err)
	}
	out := map[string]string{}
	for _, e := range entries {
		out[e.Service.ID] = e.Checks[len(e.Checks)-1].Status
	}
	return out, w.Header().Get("X-Consul-Index")
}

// As py-consul writes it, with lowercase keys.
const registration = `{"name":"x","id":"x1","port":7,"check":{"ttl":"3s","status":"passing","DeregisterCriticalServiceAfter":"30s"}}`

func TestLifeOfATTLCheck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := start(t)
		a.put("/v1/agent/service/register", registration)
		for range 10 { // renewed in time, so it stays
			time.Sleep(2900 * time.Millisecond)
			a.put("/v1/agent/check/pass/service:x1?note=fine", "")
		}
		if got, _ := a.statuses(""); got["x1"] != "passing" {
			t.Fatalf("renewed: %v", got)
		}
		time.Sleep(3100 * time.Millisecond)
		if got, _ := a.statuses(""); got["x1"] != "critical" {
			t.Fatalf("silent for 3.1 s: %v", got)
		}
		time.Sleep(29 * time.Second)
		a.put("/v1/agent/check/pass/service:x1", "") // back before the reaper
		time.Sleep(2 * time.Second)
		if got, _ := a.statuses(""); got["x1"] != "passing" {
			t.Fatalf("back: %v", got)
		}
		time.Sleep(30 * time.Second)
		if got, _ := a.statuses(""); got["x1"] != "critical" {
			t.Fatalf("critical for less than 30 s: %v", got)
		}
		time.Sleep(2 * time.Second)
		if got, _ := a.statuses(""); len(got) != 0 {
			t.Fatalf("not reaped: %v", got)
		}
	})
}

func TestBlockingQuery(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := start(t)
		_, index := a.statuses("")
		began := time.Now()
		if _, again := a.statuses("index=" + index + "&wait=7s"); again != index || time.Since(began) != 7*time.Second {
			t.Fatalf("index %s to %s after %v", index, again, time.Since(began))
		}
		type answer struct {
			got map[string]string
			at  time.Duration
		}
		answers := make(chan answer)
		began = time.Now()
		watch := func(params string) {
			got, _ := a.statuses(params)
			answers <- answer{got, time.Since(began)}
		}
		go watch("index=" + index)
		synctest.Wait()
		a.put("/v1/agent/service/register", `{"Name":"other"}`) // does not wake a watcher of x
		time.Sleep(time.Second)
		a.put("/v1/agent/service/register", registration)
		if got := <-answers; got.at != time.Second || got.got["x1"] != "passing" {
			t.Fatalf("watch of a registration: %+v", got)
		}
		_, index = a.statuses("")
		began = time.Now()
		go watch("passing=1&index=" + index)
		if got := <-answers; got.at != 3*time.Second || len(got.got) != 0 {
			t.Fatalf("watch of an expiry: %+v", got)
		}
		// An index from another life of the agent does not block.
		began = time.Now()
		n, err := strconv.Atoi(index)
		if err != nil {
			t.Fatal(err)
		}
		if a.statuses("index=" + strconv.Itoa(n+1000)); time.Since(began) != 0 {
			t.Errorf("blocked for %v", time.Since(began))
		}
	})
}

func TestRestartMovesTheIndexOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := start(t)
		a.put("/v1/agent/service/register", registration)
		_, first := a.statuses("")
		time.Sleep(time.Second)
		b := start(t)
		b.put("/v1/agent/service/register", registration)
		if _, second := b.statuses(""); second <= first {
			t.Errorf("index %s after %s", second, first)
		}
	})
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, c := range []struct {
		method, path, body string
		code               int
		says               string
	}{
		{"PUT", "/v1/agent/service/register", `{`, 400, "decode"},
		{"PUT", "/v1/agent/service/register", `{}`, 400, "missing service name"},
		{"PUT", "/v1/agent/service/register", `{"Name":"x","Check":{"HTTP":"http://h","Interval":"1s"}}`, 400, "only TTL checks"},
		{"PUT", "/v1/agent/service/register", `{"Name":"x","Check":{"TTL":"1s","Status":"fine"}}`, 400, "passing, warning or critical"},
		{"PUT", "/v1/agent/service/register", `{"Name":"x","Check":{"TTL":"1s","DeregisterCriticalServiceAfter":"x"}}`, 400, "Deregister"},
		{"PUT", "/v1/agent/check/update/none", `{"Status":"passing"}`, 404, "Unknown check"},
		{"PUT", "/v1/agent/check/update/none", `{"Status":"ok"}`, 400, "Invalid check status"},
		{"PUT", "/v1/agent/check/explode/none", ``, 400, "Invalid check status"},
		{"GET", "/v1/health/service/x?index=abc", ``, 400, "index"},
		{"GET", "/v1/health/service/x?index=1&wait=abc", ``, 400, "wait"},
		{"GET", "/v1/kv/x", ``, 404, "not part of the embedded registry"},
	} {
		w := a.do(c.method, c.path, c.body)
		if w.Code != c.code || !strings.Contains(w.Body.String(), c.says) {
			t.Errorf("%s %s %s: %d %s", c.method, c.path, c.body, w.Code, w.Body)
		}
	}
}
