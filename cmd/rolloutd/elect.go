package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"strconv"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/sqldb"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// elected names the targets of which one replica acts. Where the database is a file of this process's state folder the folder's lock
// says who that is, and nobody is elected.
func (m *mesh) elected(target string) bool {
	if !m.replicated() {
		return false
	}
	switch target {
	case "buffer", "snapshot", "learner-controller", "scheduler":
		return true
	}
	return false
}

func (m *mesh) replicated() bool {
	_, files := m.place.(sqldb.Files)
	return !files
}

// leasable is a store with a lease.
type leasable[S any] interface {
	Lease() *lease.Table
	Fenced(fence sqldb.Fence) S
	Close() error
}

// elect hosts a service that make builds over a store: as it is, or where replicas are possible an instance for each term.
func elect[S leasable[S], T lease.Service](m *mesh, name string, store S, shape func(grpc.ServiceRegistrar), make func(S) (T, error)) (hosted, error) {
	if !m.elected(name) {
		s, err := make(store)
		return hosted{service: s, close: store.Close}, err
	}
	table, log := store.Lease(), m.logger(name)
	return hosted{close: store.Close, service: lease.NewElected(lease.Options{
		Candidate: &lease.Candidate{Table: table, Holder: m.process, Address: m.endpoints.grpc, Log: log},
		Shape:     shape,
		Make:      func(epoch uint64) (lease.Service, error) { return make(store.Fenced(table.Fence(epoch))) },
		Forward:   func() (grpc.ClientConnInterface, error) { return m.dialer.Conn(name) },
		Began:     func(ctx context.Context, epoch uint64) func() { return m.lead(ctx, name, epoch) },
	})}, nil
}

// lead tells the world that this process leads a service, until what it returns is called.
func (m *mesh) lead(ctx context.Context, name string, epoch uint64) (ended func()) {
	m.tell(name, eventv1.Level_LEVEL_INFO, epoch, "leads")
	registered, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		s := m.instance(name)
		s.Meta[discovery.MetaEpoch] = strconv.FormatUint(epoch, 10)
		r, err := m.discovery.Register(registered, s)
		if err == nil {
			r.Wait()
		} else if registered.Err() == nil {
			m.log.Error("the leader can't be registered, and will not be found", "service", name, "error", err)
		}
	}()
	withdraw := context.AfterFunc(ctx, cancel) // before the work has ended: no new calls
	return func() {
		withdraw()
		cancel()
		<-done
		if errors.Is(context.Cause(ctx), lease.ErrNotLeader) {
			m.tell(name, eventv1.Level_LEVEL_WARN, epoch, "stepped down, another replica leads")
			return
		}
		m.tell(name, eventv1.Level_LEVEL_INFO, epoch, "set its lease free")
	}
}

func (m *mesh) tell(service string, level eventv1.Level, epoch uint64, what string) {
	m.events.Emit(&eventv1.Event{
		Service: service, Level: level, Kind: "leader", Message: fmt.Sprintf("%s at %s %s (epoch %d)", service, m.endpoints.grpc, what, epoch),
		Attributes: map[string]string{"epoch": strconv.FormatUint(epoch, 10), "address": m.endpoints.grpc, "process": m.process},
	})
}

// instance is what a target of this process registers in discovery.
func (m *mesh) instance(name string) discovery.Service {
	host, port, _ := net.SplitHostPort(m.endpoints.grpc) // made by net.JoinHostPort
	n, _ := strconv.Atoi(port)
	return discovery.Service{Name: name, ID: name + "-" + m.process, Address: host, Port: n, Meta: maps.Clone(m.meta)}
}

// identify draws what tells this process from others.
func (m *mesh) identify(pid string) {
	m.process = id.New(m.began)
	m.meta = map[string]string{"process": m.process, "pid": pid, "version": version}
}
