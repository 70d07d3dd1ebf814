package registry

import (
	"crypto/subtle"
	"encoding/json"
	"fmt"
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

// Handler serves the API:
//
//	GET  /v1/status/leader, /v1/status/peers, /v1/agent/self
//	PUT  /v1/agent/service/register, /v1/agent/service/deregister/ID
//	PUT  /v1/agent/check/{pass,warn,fail,update}/ID
//	GET  /v1/agent/services, /v1/agent/checks, /v1/agent/service/ID
//	GET  /v1/health/service/NAME (passing, tag, index, wait), /v1/health/checks/NAME, /v1/catalog/services, /v1/catalog/service/NAME
//
// Errors are plain text with Consul's status codes. What is not here answers 404 and says so.
func (r *Registry) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status/leader", func(w http.ResponseWriter, _ *http.Request) { reply(w, "127.0.0.1:8300") })
	mux.HandleFunc("GET /v1/status/peers", func(w http.ResponseWriter, _ *http.Request) { reply(w, []string{"127.0.0.1:8300"}) })
	mux.HandleFunc("GET /v1/agent/self", r.self)
	mux.HandleFunc("PUT /v1/agent/service/register", r.putService)
	mux.HandleFunc("PUT /v1/agent/service/deregister/{id...}", r.deleteService)
	mux.HandleFunc("PUT /v1/agent/check/{verb}/{id...}", r.putCheck)
	mux.HandleFunc("GET /v1/agent/services", r.agentServices)
	mux.HandleFunc("GET /v1/agent/service/{id...}", r.agentService)
	mux.HandleFunc("GET /v1/agent/checks", func(w http.ResponseWriter, _ *http.Request) { reply(w, r.agentChecks()) })
	mux.HandleFunc("GET /v1/health/service/{name}", r.healthService)
	mux.HandleFunc("GET /v1/health/checks/{name}", r.healthChecks)
	mux.HandleFunc("GET /v1/catalog/services", r.catalogServices)
	mux.HandleFunc("GET /v1/catalog/service/{name}", r.catalogService)
	mux.HandleFunc("/", func(w http.ResponseWriter, req *http.Request) {
		http.Error(w, req.Method+" "+req.URL.Path+" is not part of the embedded registry; a real Consul has it", http.StatusNotFound)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !r.authorized(req) {
			http.Error(w, "Permission denied: the X-Consul-Token header lacks or has another token", http.StatusForbidden)
			return
		}
		req.Body = http.MaxBytesReader(w, req.Body, maxBody)
		mux.ServeHTTP(w, req)
	})
}

func (r *Registry) authorized(req *http.Request) bool {
	if r.token == "" {
		return true
	}
	got := req.Header.Get("X-Consul-Token")
	if got == "" {
		got = strings.TrimPrefix(req.Header.Get("Authorization"), "Bearer ")
	}
	return subtle.ConstantTimeCompare([]byte(got), []byte(r.token)) == 1
}

func (r *Registry) self(w http.ResponseWriter, _ *http.Request) {
	reply(w, map[string]any{
		"Config": map[string]any{"NodeName": nodeName, "NodeID": nodeID, "Datacenter": datacenter, "Server": true, "Version": "1.16.2"},
		"Member": map[string]any{"Name": nodeName, "Addr": "127.0.0.1", "Status": 1, "Tags": map[string]string{}},
		"Meta":   map[string]string{},
	})
}

func (r *Registry) putService(w http.ResponseWriter, req *http.Request) {
	var reg consul.AgentServiceRegistration
	if err := json.NewDecoder(req.Body).Decode(&reg); err != nil {
		http.Error(w, "Request decode failed: "+err.Error(), http.StatusBadRequest)
		return
	}
	s, checks, err := build(&reg)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.register(s, checks)
}

// build checks a registration and fills in Consul's defaults.
func build(reg *consul.AgentServiceRegistration) (s consul.AgentService, checks []*check, err error) {
	if reg.Name == "" {
		return s, nil, fmt.Errorf("missing service name")
	}
	s = consul.AgentService{
		ID: reg.ID, Service: reg.Name, Tags: reg.Tags, Meta: reg.Meta, Port: reg.Port, Address: reg.Address,
		EnableTagOverride: reg.EnableTagOverride, Weights: consul.AgentWeights{Passing: 1, Warning: 1}, Datacenter: datacenter,
	}
	if s.ID == "" {
		s.ID = s.Service
	}
	if s.Tags == nil {
		s.Tags = []string{}
	}
	if s.Meta == nil {
		s.Meta = map[string]string{}
	}
	if reg.Weights != nil {
		s.Weights = *reg.Weights
	}
	specs := reg.Checks
	if reg.Check != nil {
		specs = append(consul.AgentServiceChecks{reg.Check}, specs...)
	}
	for i, spec := range specs {
		c, err := buildCheck(spec)
		if err != nil {
			return s, nil, err
		}
		if c.id == "" {
			c.id = "service:" + s.ID
			if len(specs) > 1 {
				c.id += ":" + strconv.Itoa(i+1)
			}
		}
		if c.name == "" {
			c.name = "Service '" + s.Service + "' check"
		}
		checks = append(checks, c)
	}
	return s, checks, nil
}

func buildCheck(spec *consul.AgentServiceCheck) (*check, error) {
	c := &check{id: spec.CheckID, name: spec.Name, notes: spec.Notes, status: spec.Status}
	var err error
	if c.ttl, err = time.ParseDuration(spec.TTL); err != nil || c.ttl <= 0 {
		return nil, fmt.Errorf("the embedded registry has TTL checks alone; this one has TTL %q", spec.TTL)
	}
	if spec.DeregisterCriticalServiceAfter != "" {
		if c.reapAfter, err = time.ParseDuration(spec.DeregisterCriticalServiceAfter); err != nil {
			return nil, fmt.Errorf("invalid DeregisterCriticalServiceAfter: %w", err)
		}
	}
	switch c.status {
	case "":
		c.status = consul.HealthCritical // until the first renewal
	case consul.HealthPassing, consul.HealthWarning, consul.HealthCritical:
	default:
		return nil, fmt.Errorf("status for checks must be passing, warning or critical, not %q", c.status)
	}
	return c, nil
}

func (r *Registry) deleteService(w http.ResponseWriter, req *http.Request) {
	if id := req.PathValue("id"); !r.deregister(id) {
		http.Error(w, fmt.Sprintf("Unknown service ID %q", id), http.StatusNotFound)
	}
}

func (r *Registry) putCheck(w http.ResponseWriter, req *http.Request) {
	status, output := "", req.URL.Query().Get("note")
	switch req.PathValue("verb") {
	case "pass":
		status = consul.HealthPassing
	case "warn":
		status = consul.HealthWarning
	case "fail":
		status = consul.HealthCritical
	case "update":
		var body struct{ Status, Output string }
		if err := json.NewDecoder(req.Body).Decode(&body); err != nil {
			http.Error(w, "Request decode failed: "+err.Error(), http.StatusBadRequest)
			return
		}
		status, output = body.Status, body.Output
	}
	switch status {
	case consul.HealthPassing, consul.HealthWarning, consul.HealthCritical:
	default:
		http.Error(w, fmt.Sprintf("Invalid check status: %q", status), http.StatusBadRequest)
		return
	}
	if id := req.PathValue("id"); !r.update(id, status, output) {
		http.Error(w, fmt.Sprintf("Unknown check ID %q", id), http.StatusNotFound)
	}
}

func (r *Registry) agentServices(w http.ResponseWriter, _ *http.Request) {
	reply(w, r.agentServicesByID())
}

func (r *Registry) agentService(w http.ResponseWriter, req *http.Request) {
	s, ok := r.agentServicesByID()[req.PathValue("id")]
	if !ok {
		http.Error(w, "unknown service ID: "+req.PathValue("id"), http.StatusNotFound)
		return
	}
	reply(w, s)
}

func (r *Registry) healthService(w http.ResponseWriter, req *http.Request) {
	values := req.URL.Query()
	q := query{name: req.PathValue("name"), tags: values["tag"]}
	if values.Has("passing") { // "?passing" alone means true
		on, err := strconv.ParseBool(values.Get("passing"))
		q.passing = values.Get("passing") == "" || err == nil && on
	}
	out := []*consul.ServiceEntry{}
	r.blocking(w, req, q.name, func() {
		for _, e := range r.sorted(q.matches) {
			out = append(out, e.serviceEntry())
		}
	}, func() any { return out })
}

func (r *Registry) healthChecks(w http.ResponseWriter, req *http.Request) {
	out := consul.HealthChecks{}
	r.blocking(w, req, req.PathValue("name"), func() {
		for _, e := range r.sorted(query{name: req.PathValue("name")}.matches) {
			out = append(out, e.health()[1:]...)
		}
	}, func() any { return out })
}

func (r *Registry) catalogServices(w http.ResponseWriter, req *http.Request) {
	out := map[string][]string{"consul": {}}
	r.blocking(w, req, "", func() {
		for _, e := range r.services {
			name := e.service.Service
			out[name] = union(out[name], e.service.Tags)
		}
	}, func() any { return out })
}

func (r *Registry) catalogService(w http.ResponseWriter, req *http.Request) {
	q := query{name: req.PathValue("name"), tags: req.URL.Query()["tag"]}
	out := []*consul.CatalogService{}
	r.blocking(w, req, q.name, func() {
		for _, e := range r.sorted(q.matches) {
			out = append(out, e.catalogService())
		}
	}, func() any { return out })
}

// blocking answers a query that may wait for a change (parameters index and wait).
func (r *Registry) blocking(w http.ResponseWriter, req *http.Request, name string, view func(), body func() any) {
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
	index := r.read(req.Context(), name, since, wait, view)
	h := w.Header()
	h.Set("X-Consul-Index", strconv.FormatUint(index, 10))
	h.Set("X-Consul-Knownleader", "true")
	h.Set("X-Consul-Lastcontact", "0")
	reply(w, body())
}

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // a client that left needs no answer
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
