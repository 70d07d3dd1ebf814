// Package registry is an in-process service registry. It implements the subset of Consul's agent
// API that service discovery needs, so that clients of both languages use it and a real Consul in
// the same way.
//
// Registrations are kept in memory. Clients renew a TTL check and register again when
// the registry forgot it.
//
//	registered --Status or first renewal--> passing | warning
//	passing, warning --no renewal for TTL, or set by client--> critical --DeregisterCriticalServiceAfter--> gone
package registry

import (
	"context"
	"slices"
	"sync"
	"time"

	consul "github.com/hashicorp/consul/api"
)

// Registry has the registered services. Its methods may be called from many goroutines.
type Registry struct {
	token string
	run   func(ctx context.Context, token string) (run string, ok bool) // of the credentials of workers; nil: none is accepted

	mu       sync.Mutex
	index    uint64            // of the last change
	changed  chan struct{}     // closed at the next change
	services map[string]*entry // by service id
	indexOf  map[string]uint64 // by service name: index of its last change, kept after its last instance was removed
	closed   bool
}

// entry is a registered service and its checks.
type entry struct {
	service consul.AgentService
	checks  []*check
}

// check is a TTL check, or a constant one (a service without a check passes).
type check struct {
	id, name, notes string
	status, output  string
	ttl, reapAfter  time.Duration
	expire, reap    *time.Timer
	created         uint64
	modified        uint64
}

// New returns an empty registry. If token is not empty every request must carry it. Index values
// begin at the current time, so that they increase over a restart.
func New(token string) *Registry {
	return &Registry{
		token:    token,
		index:    uint64(time.Now().UnixMilli()),
		changed:  make(chan struct{}),
		services: map[string]*entry{},
		indexOf:  map[string]uint64{},
	}
}

// NewScoped is New with tokens of workers, of which run returns the run: with one of them a client
// reads everything, and changes the registrations of workers of this run only.
func NewScoped(token string, run func(ctx context.Context, token string) (run string, ok bool)) *Registry {
	r := New(token)
	r.run = run
	return r
}

// Close stops the timers and wakes every waiting query.
func (r *Registry) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	r.closed = true
	for _, e := range r.services {
		e.stop()
	}
	close(r.changed)
}

func (e *entry) stop() {
	for _, c := range e.checks {
		c.stop()
	}
}

func (c *check) stop() {
	for _, t := range []*time.Timer{c.expire, c.reap} {
		if t != nil {
			t.Stop()
		}
	}
}

// touch records a change of the named service and wakes waiting queries. The caller holds mu.
func (r *Registry) touch(name string) uint64 {
	if r.closed {
		return r.index
	}
	r.index++
	r.indexOf[name] = r.index
	close(r.changed)
	r.changed = make(chan struct{})
	return r.index
}

// register adds or replaces a service.
func (r *Registry) register(s consul.AgentService, checks []*check) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if old := r.services[s.ID]; old != nil {
		old.stop()
		s.CreateIndex = old.service.CreateIndex
		for _, c := range checks { // as in Consul, an existing check keeps its state
			if o := old.check(c.id); o != nil {
				c.status, c.output = o.status, o.output
			}
		}
		if old.service.Service != s.Service {
			r.touch(old.service.Service)
		}
	}
	e := &entry{service: s, checks: checks}
	r.services[s.ID] = e
	index := r.touch(s.Service)
	if e.service.CreateIndex == 0 {
		e.service.CreateIndex = index
	}
	e.service.ModifyIndex = index
	for _, c := range checks {
		c.created, c.modified = index, index
		r.arm(e, c)
	}
}

// deregister removes a service and reports whether it existed.
func (r *Registry) deregister(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.remove(id)
}

func (r *Registry) remove(id string) bool {
	e := r.services[id]
	if e == nil {
		return false
	}
	e.stop()
	delete(r.services, id)
	r.touch(e.service.Service)
	return true
}

// update sets the state of a TTL check and restarts its TTL. It reports whether the check exists.
func (r *Registry) update(id, status, output string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.services {
		if c := e.check(id); c != nil && c.ttl > 0 {
			r.set(e, c, status, output)
			r.arm(e, c)
			return true
		}
	}
	return false
}

// set changes a check and wakes watchers if its status changes. The caller holds mu.
func (r *Registry) set(e *entry, c *check, status, output string) {
	c.output = output
	if c.status == status {
		return
	}
	c.status = status
	c.modified = r.touch(e.service.Service)
}

// arm starts the timers for the state of a check. The caller holds mu.
func (r *Registry) arm(e *entry, c *check) {
	if c.expire != nil {
		c.expire.Stop()
	}
	if c.ttl > 0 && c.status != consul.HealthCritical {
		var t *time.Timer
		t = time.AfterFunc(c.ttl, func() { r.expired(e, c, &t) })
		c.expire = t
	}
	if c.status != consul.HealthCritical && c.reap != nil {
		c.reap.Stop()
		c.reap = nil
	}
	if c.status == consul.HealthCritical && c.reapAfter > 0 && c.reap == nil {
		c.reap = time.AfterFunc(c.reapAfter, func() { r.reaped(e, c) })
	}
}

// expired runs when a TTL has passed. The timer may have been replaced before it gets the lock.
func (r *Registry) expired(e *entry, c *check, t **time.Timer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || r.services[e.service.ID] != e || c.expire != *t {
		return
	}
	r.set(e, c, consul.HealthCritical, "TTL expired: no renewal for "+c.ttl.String())
	r.arm(e, c)
}

func (r *Registry) reaped(e *entry, c *check) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed && r.services[e.service.ID] == e && c.status == consul.HealthCritical {
		r.remove(e.service.ID)
	}
}

func (e *entry) check(id string) *check {
	if i := slices.IndexFunc(e.checks, func(c *check) bool { return c.id == id }); i >= 0 {
		return e.checks[i]
	}
	return nil
}

// passing reports whether every check of the entry is in the passing state.
func (e *entry) passing() bool {
	return !slices.ContainsFunc(e.checks, func(c *check) bool { return c.status != consul.HealthPassing })
}
