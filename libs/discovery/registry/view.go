package registry

import (
	"context"
	"slices"
	"strings"
	"time"

	consul "github.com/hashicorp/consul/api"
)

const (
	nodeName   = "rolloutd"
	datacenter = "dc1"
	nodeID     = "00000000-0000-4000-8000-000000000001"
)

// query selects instances of a service by name.
type query struct {
	name    string
	passing bool
	tags    []string // each of them
}

func (q query) matches(e *entry) bool {
	if e.service.Service != q.name || q.passing && !e.passing() {
		return false
	}
	return !slices.ContainsFunc(q.tags, func(tag string) bool {
		return !slices.ContainsFunc(e.service.Tags, func(t string) bool { return strings.EqualFold(t, tag) })
	})
}

// read calls view under the lock when the named service ("" for the whole table) has changed after
// since, at the latest after wait, and returns the index that the view has. since = 0 does not
// wait.
func (r *Registry) read(ctx context.Context, name string, since uint64, wait time.Duration, view func()) uint64 {
	timeout := time.NewTimer(wait)
	defer timeout.Stop()
	for {
		r.mu.Lock()
		current := r.current(name)
		// A different index is from before a restart of the registry: answer at once.
		if since == 0 || current != since || r.closed {
			view()
			r.mu.Unlock()
			return current
		}
		changed := r.changed
		r.mu.Unlock()
		select {
		case <-changed:
			continue
		case <-timeout.C:
		case <-ctx.Done():
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		view()
		return r.current(name)
	}
}

// current returns the index of a service, never 0. An unknown name has the index 1, which its first
// registration exceeds.
func (r *Registry) current(name string) uint64 {
	if name == "" {
		return r.index
	}
	return max(1, r.indexOf[name])
}

// sorted returns the matching entries by service id, so that the order of answers is stable.
func (r *Registry) sorted(match func(*entry) bool) []*entry {
	var out []*entry
	for _, e := range r.services {
		if match(e) {
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(a, b *entry) int { return strings.Compare(a.service.ID, b.service.ID) })
	return out
}

func node() *consul.Node {
	return &consul.Node{
		ID: nodeID, Node: nodeName, Address: "127.0.0.1", Datacenter: datacenter,
		TaggedAddresses: map[string]string{"lan": "127.0.0.1"}, Meta: map[string]string{}, CreateIndex: 1, ModifyIndex: 1,
	}
}

func (e *entry) health() consul.HealthChecks {
	out := consul.HealthChecks{{
		Node: nodeName, CheckID: "serfHealth", Name: "Serf Health Status", Status: consul.HealthPassing,
		Output: "Agent alive and reachable", ServiceTags: []string{}, CreateIndex: 1, ModifyIndex: 1,
	}}
	for _, c := range e.checks {
		out = append(out, &consul.HealthCheck{
			Node: nodeName, CheckID: c.id, Name: c.name, Status: c.status, Notes: c.notes, Output: c.output,
			ServiceID: e.service.ID, ServiceName: e.service.Service, ServiceTags: e.service.Tags, Type: c.kind(),
			CreateIndex: c.created, ModifyIndex: c.modified,
		})
	}
	return out
}

func (c *check) kind() string {
	if c.ttl > 0 {
		return "ttl"
	}
	return ""
}

func (e *entry) serviceEntry() *consul.ServiceEntry {
	s := e.service
	return &consul.ServiceEntry{Node: node(), Service: &s, Checks: e.health()}
}

func (e *entry) catalogService() *consul.CatalogService {
	s := e.service
	return &consul.CatalogService{
		ID: nodeID, Node: nodeName, Address: "127.0.0.1", Datacenter: datacenter,
		TaggedAddresses: map[string]string{"lan": "127.0.0.1"}, NodeMeta: map[string]string{},
		ServiceID: s.ID, ServiceName: s.Service, ServiceAddress: s.Address, ServiceTags: s.Tags, ServiceMeta: s.Meta,
		ServicePort: s.Port, ServiceWeights: consul.Weights{Passing: s.Weights.Passing, Warning: s.Weights.Warning},
		ServiceTaggedAddresses: map[string]consul.ServiceAddress{}, CreateIndex: s.CreateIndex, ModifyIndex: s.ModifyIndex,
	}
}

// agentChecks is the agent's own view of checks, by check id.
func (r *Registry) agentChecks() map[string]*consul.AgentCheck {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := map[string]*consul.AgentCheck{}
	for _, e := range r.services {
		for _, c := range e.checks {
			out[c.id] = &consul.AgentCheck{
				Node: nodeName, CheckID: c.id, Name: c.name, Status: c.status, Notes: c.notes, Output: c.output,
				ServiceID: e.service.ID, ServiceName: e.service.Service, Type: c.kind(),
			}
		}
	}
	return out
}

// agentServicesByID is the agent's own view of services. Slices and maps of a registered service
// never change, so copies of the struct may leave the lock.
func (r *Registry) agentServicesByID() map[string]consul.AgentService {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := map[string]consul.AgentService{}
	for id, e := range r.services {
		out[id] = e.service
	}
	return out
}
