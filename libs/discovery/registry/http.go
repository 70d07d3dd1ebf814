package registry

import (
	"bytes"
	"crypto/subtle"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	consul "github.com/hashicorp/consul/api"
)

const (
	defaultWait = 5 * time.Minute // both as Consul has them
	maxWait     = 10 * time.Minute
	maxBody     = 1 << 20
)

// api serves a registry over HTTP.
type api struct{ registry *Registry }

// Handler returns the HTTP API of the registry:
//
//	GET  /v1/status/leader, /v1/status/peers, /v1/agent/self
//	PUT  /v1/agent/service/register, /v1/agent/service/deregister/ID
//	PUT  /v1/agent/check/{pass,warn,fail,update}/ID
//	GET  /v1/agent/services, /v1/agent/checks, /v1/agent/service/ID
//	GET  /v1/health/service/NAME (passing, tag, index, wait), /v1/health/checks/NAME, /v1/catalog/services, /v1/catalog/service/NAME
//
// Errors are plain text with Consul's status codes. Other paths are answered with 404.
func (r *Registry) Handler() http.Handler {
	a := api{r}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status/leader", func(w http.ResponseWriter, _ *http.Request) { reply(w, "127.0.0.1:8300") })
	mux.HandleFunc("GET /v1/status/peers", func(w http.ResponseWriter, _ *http.Request) { reply(w, []string{"127.0.0.1:8300"}) })
	mux.HandleFunc("GET /v1/agent/self", a.self)
	mux.HandleFunc("PUT /v1/agent/service/register", a.putService)
	mux.HandleFunc("PUT /v1/agent/service/deregister/{id...}", a.deleteService)
	mux.HandleFunc("PUT /v1/agent/check/{verb}/{id...}", a.putCheck)
	mux.HandleFunc("GET /v1/agent/services", a.agentServices)
	mux.HandleFunc("GET /v1/agent/service/{id...}", a.agentService)
	mux.HandleFunc("GET /v1/agent/checks", func(w http.ResponseWriter, _ *http.Request) { reply(w, r.agentChecks()) })
	mux.HandleFunc("GET /v1/health/service/{name}", a.healthService)
	mux.HandleFunc("GET /v1/health/checks/{name}", a.healthChecks)
	mux.HandleFunc("GET /v1/catalog/services", a.catalogServices)
	mux.HandleFunc("GET /v1/catalog/service/{name}", a.catalogService)
	mux.HandleFunc("/", func(w http.ResponseWriter, req *http.Request) {
		http.Error(w, req.Method+" "+req.URL.Path+" is not part of the embedded registry; a real Consul has it", http.StatusNotFound)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !a.authorized(req) {
			http.Error(w, "Permission denied: the X-Consul-Token header lacks or has another token", http.StatusForbidden)
			return
		}
		req.Body = http.MaxBytesReader(w, req.Body, maxBody)
		mux.ServeHTTP(w, req)
	})
}

func (a api) authorized(req *http.Request) bool {
	if a.registry.token == "" {
		return true
	}
	got := req.Header.Get("X-Consul-Token")
	if got == "" {
		got = strings.TrimPrefix(req.Header.Get("Authorization"), "Bearer ")
	}
	if subtle.ConstantTimeCompare([]byte(got), []byte(a.registry.token)) == 1 {
		return true
	}
	if a.registry.run == nil {
		return false
	}
	run, ok := a.registry.run(req.Context(), got)
	return ok && (req.Method == http.MethodGet || ofRun(req, run))
}

// ofRun reports whether a request changes a worker of a run.
func ofRun(req *http.Request, run string) bool {
	own := run + "/"
	if id, ok := strings.CutPrefix(req.URL.Path, "/v1/agent/service/deregister/"); ok {
		return strings.HasPrefix(id, own)
	}
	if rest, ok := strings.CutPrefix(req.URL.Path, "/v1/agent/check/"); ok {
		_, id, _ := strings.Cut(rest, "/")
		return strings.HasPrefix(id, "service:"+own)
	}
	if req.URL.Path != "/v1/agent/service/register" {
		return false
	}
	body, err := io.ReadAll(io.LimitReader(req.Body, maxBody))
	if err != nil {
		return false
	}
	req.Body = io.NopCloser(bytes.NewReader(body))
	var service struct{ ID, Name string }
	return json.Unmarshal(body, &service) == nil && strings.HasPrefix(service.ID, own) && strings.HasSuffix(service.Name, "-worker")
}

func (a api) self(w http.ResponseWriter, _ *http.Request) {
	reply(w, map[string]any{
		"Config": map[string]any{"NodeName": nodeName, "NodeID": nodeID, "Datacenter": datacenter, "Server": true, "Version": "1.16.2"},
		"Member": map[string]any{"Name": nodeName, "Addr": "127.0.0.1", "Status": 1, "Tags": map[string]string{}},
		"Meta":   map[string]string{},
	})
}

func (a api) agentServices(w http.ResponseWriter, _ *http.Request) {
	reply(w, a.registry.agentServicesByID())
}

func (a api) agentService(w http.ResponseWriter, req *http.Request) {
	s, ok := a.registry.agentServicesByID()[req.PathValue("id")]
	if !ok {
		http.Error(w, "unknown service ID: "+req.PathValue("id"), http.StatusNotFound)
		return
	}
	reply(w, s)
}

func (a api) healthService(w http.ResponseWriter, req *http.Request) {
	values := req.URL.Query()
	q := query{name: req.PathValue("name"), tags: values["tag"]}
	if values.Has("passing") { // "?passing" without a value means true
		on, err := strconv.ParseBool(values.Get("passing"))
		q.passing = values.Get("passing") == "" || err == nil && on
	}
	out := []*consul.ServiceEntry{}
	a.blocking(w, req, q.name, func() {
		for _, e := range a.registry.sorted(q.matches) {
			out = append(out, e.serviceEntry())
		}
	}, func() any { return out })
}

func (a api) healthChecks(w http.ResponseWriter, req *http.Request) {
	out := consul.HealthChecks{}
	a.blocking(w, req, req.PathValue("name"), func() {
		for _, e := range a.registry.sorted(query{name: req.PathValue("name")}.matches) {
			out = append(out, e.health()[1:]...)
		}
	}, func() any { return out })
}

func (a api) catalogServices(w http.ResponseWriter, req *http.Request) {
	out := map[string][]string{"consul": {}}
	a.blocking(w, req, "", func() {
		for _, e := range a.registry.services {
			name := e.service.Service
			out[name] = union(out[name], e.service.Tags)
		}
	}, func() any { return out })
}

func (a api) catalogService(w http.ResponseWriter, req *http.Request) {
	q := query{name: req.PathValue("name"), tags: req.URL.Query()["tag"]}
	out := []*consul.CatalogService{}
	a.blocking(w, req, q.name, func() {
		for _, e := range a.registry.sorted(q.matches) {
			out = append(out, e.catalogService())
		}
	}, func() any { return out })
}

// blocking answers a query that may wait for a change (parameters index and wait).
func (a api) blocking(w http.ResponseWriter, req *http.Request, name string, view func(), body func() any) {
	values := req.URL.Query()
	var since uint64
	if s := values.Get("index"); s != "" {
		var err error
		if since, err = strconv.ParseUint(s, 10, 64); err != nil {
			http.Error(w, "Invalid index", http.StatusBadRequest)
			return
		}
	}
	wait := defaultWait
	if s := values.Get("wait"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			http.Error(w, "Invalid wait time", http.StatusBadRequest)
			return
		}
		wait = min(d, maxWait)
	}
	index := a.registry.read(req.Context(), name, since, wait, view)
	h := w.Header()
	h.Set("X-Consul-Index", strconv.FormatUint(index, 10))
	h.Set("X-Consul-Knownleader", "true")
	h.Set("X-Consul-Lastcontact", "0")
	reply(w, body())
}

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // a client that disconnected needs no answer
}

func union(a, b []string) []string {
	out := append([]string{}, a...)
	for _, s := range b {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
