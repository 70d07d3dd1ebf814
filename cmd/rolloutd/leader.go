package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"strconv"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// elected reports whether replicas of a target elect a leader. With SQLite they do not: the lock of
// the state folder allows one process only.
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

// leasable is a store with a leader lease.
type leasable[S any] interface {
	Lease() *lease.Table
	Fenced(fence sqldb.Fence) S
	Close() error
}

// elect hosts a service that make builds on a store. Where replicas are possible, it builds an
// instance for each term in which this process leads; otherwise each start is a term.
func elect[S leasable[S], T lease.Service](ctx context.Context, m *mesh, name string, store S, shape func(grpc.ServiceRegistrar), make func(S, uint64) (T, error)) (hosted, error) {
	table, log := store.Lease(), m.logger(name)
	if !m.elected(name) {
		mine, err := table.Begin(ctx, m.process, m.endpoints.grpc)
		if err != nil {
			return hosted{close: store.Close}, err
		}
		s, err := make(store, mine.Epoch)
		return hosted{service: s, close: store.Close}, err
	}
	return hosted{close: store.Close, service: lease.NewElected(lease.Options{
		Candidate: &lease.Candidate{Table: table, Holder: m.process, Address: m.endpoints.grpc, Log: log, TTL: leaseTTL(name)},
		Shape:     shape,
		Make:      func(epoch uint64) (lease.Service, error) { return make(store.Fenced(table.Fence(epoch)), epoch) },
		Forward:   func() (grpc.ClientConnInterface, error) { return m.dialer.Conn(name) },
		Began:     func(ctx context.Context, epoch uint64) func() { return m.registerLeader(ctx, name, epoch) },
	})}, nil
}

// leaseTTL is how long the lease of a service is valid without a renewal; 0: the default. That of
// the scheduler is shorter: a run waits for it, and a takeover by mistake costs little, because the
// next leader adopts the workers.
func leaseTTL(service string) time.Duration {
	if service == names.SchedulerService {
		return 1500 * time.Millisecond
	}
	return 0
}

// registerLeader registers this process as the leader of a service until ended is called.
func (m *mesh) registerLeader(ctx context.Context, name string, epoch uint64) (ended func()) {
	m.emitLeader(name, eventv1.Level_LEVEL_INFO, epoch, "became leader")
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
			m.log.Error("the leader could not be registered; calls will not reach it", "service", name, "error", err)
		}
	}()
	withdraw := context.AfterFunc(ctx, cancel) // stop new calls before the work ends
	return func() {
		withdraw()
		cancel()
		<-done
		if errors.Is(context.Cause(ctx), lease.ErrNotLeader) {
			m.emitLeader(name, eventv1.Level_LEVEL_WARN, epoch, "stepped down: another replica leads")
			return
		}
		m.emitLeader(name, eventv1.Level_LEVEL_INFO, epoch, "released its lease")
	}
}

func (m *mesh) emitLeader(service string, level eventv1.Level, epoch uint64, what string) {
	m.events.Emit(&eventv1.Event{
		Service: service, Level: level, Kind: "leader", Message: fmt.Sprintf("%s at %s %s (epoch %d)", service, m.endpoints.grpc, what, epoch),
		Attributes: map[string]string{"epoch": strconv.FormatUint(epoch, 10), "address": m.endpoints.grpc, "process": m.process},
	})
}

// instance returns the discovery entry of a target of this process.
func (m *mesh) instance(name string) discovery.Service {
	host, port, _ := net.SplitHostPort(m.endpoints.grpc) // from net.JoinHostPort
	n, _ := strconv.Atoi(port)
	return discovery.Service{Name: name, ID: name + "-" + m.process, Address: host, Port: n, Meta: maps.Clone(m.meta)}
}

// identify sets the unique id of this process.
func (m *mesh) identify(pid string) {
	m.process = id.New(m.began)
	m.meta = map[string]string{"process": m.process, "pid": pid, "version": version}
}
