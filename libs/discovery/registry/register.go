package registry

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	consul "github.com/hashicorp/consul/api"
)

func (a api) putService(w http.ResponseWriter, req *http.Request) {
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
	a.registry.register(s, checks)
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
		return nil, fmt.Errorf("the embedded registry supports only TTL checks; the TTL of this one is %q", spec.TTL)
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

func (a api) deleteService(w http.ResponseWriter, req *http.Request) {
	if id := req.PathValue("id"); !a.registry.deregister(id) {
		http.Error(w, fmt.Sprintf("Unknown service ID %q", id), http.StatusNotFound)
	}
}

func (a api) putCheck(w http.ResponseWriter, req *http.Request) {
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
	if id := req.PathValue("id"); !a.registry.update(id, status, output) {
		http.Error(w, fmt.Sprintf("Unknown check ID %q", id), http.StatusNotFound)
	}
}
