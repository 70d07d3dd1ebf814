package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/backend"
	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/lifecycle"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/telemetry"
)

// mesh holds what the services of this process share. Constructors of targets read it.
type mesh struct {
	cfg       config.Config
	environ   []string
	endpoints endpoints
	bus       *bus.Bus
	discovery *discovery.Client
	server    *rpc.Server
	dialer    *rpc.Dialer
	keys      *apikey.Ring // of the gateway's store
	projects  *apikey.Projects
	seal      *discovery.Seal
	events    *telemetry.Events
	log       *slog.Logger // records with a run become events
	certs     *cert.Source // nil: plain text
	place     sqldb.Place  // of the services' databases
	began     time.Time
	process   string            // unique, new for each start
	meta      map[string]string // of this process, in discovery
}

// serve builds the process from its configuration and runs it until drain ends. Components start in
// the order in which they are added and stop in reverse.
func serve(drain, hard context.Context, cfg config.Config, targets []target, environ []string, handler slog.Handler) (err error) {
	began := time.Now()
	log := slog.New(handler)
	place, err := backend.Databases(cfg, environ)
	if err != nil {
		return err
	}
	unlock, err := lockState(cfg.StateDir)
	if err != nil {
		return err
	}
	defer unlock()
	endTelemetry, err := telemetry.Setup(drain, "rolloutd", version, environ)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		if e := endTelemetry(ctx); e != nil {
			log.Warn("traces and metrics were not all exported", "error", e)
		}
	}()

	group := &lifecycle.Group{Log: log, Grace: cfg.Drain + drainMargin}
	m := &mesh{cfg: cfg, environ: environ, place: place, began: began}
	m.identify(strconv.Itoa(os.Getpid()))
	if m.certs, err = openCertificates(cfg.TLS, log); err != nil {
		return err
	}
	closeServers, err := m.startServers(drain, targets, group, log)
	defer closeServers()
	if err != nil {
		return err
	}
	if err := m.connect(drain, log); err != nil {
		return err
	}
	defer m.bus.Close()
	if err := m.buildEdge(drain, targets, group, handler); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.dialer.Close()) }()
	gateway, closeStores, err := m.addServices(drain, targets, group)
	defer closeStores()
	if err != nil {
		return err
	}
	group.Add("registration", m.registration(targets, gateway).run)
	return group.Run(drain, hard)
}

// drainMargin is added to the drain time of calls, because workers have a grace period too.
const drainMargin = 15 * time.Second

// connect opens the bus and checks that discovery answers.
func (m *mesh) connect(ctx context.Context, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	var err error
	o := m.endpoints.natsAccess
	o.URL, o.Log = m.endpoints.nats, log
	if m.bus, err = bus.Connect(ctx, o); err != nil {
		return err
	}
	agentTLS, err := backend.TLS("consul", m.cfg.Consul.CAFile, m.cfg.Consul.CertFile, m.cfg.Consul.KeyFile, log)
	if agentTLS == nil && m.ownRegistry() {
		agentTLS = mutual(m.certs)
	}
	m.seal = discovery.NewSeal(m.endpoints.token)
	if err == nil {
		m.discovery, err = discovery.NewClient(discovery.Options{
			Address: m.endpoints.consul, Token: m.endpoints.consulToken, TLS: agentTLS, Seal: m.seal, Log: log,
		})
	}
	if err == nil {
		err = m.discovery.Ready(ctx)
	}
	m.meta[metaMesh] = meshID(m.endpoints.token)
	if err == nil && !m.ownRegistry() {
		err = m.checkMesh(ctx)
	}
	if err != nil {
		m.bus.Close()
		return fmt.Errorf("registry at %s: %w", m.endpoints.consul, err)
	}
	return nil
}

// buildEdge makes the gRPC server, the dialer and the publisher of events.
func (m *mesh) buildEdge(ctx context.Context, targets []target, group *lifecycle.Group, handler slog.Handler) error {
	plain := slog.New(handler)
	m.events = telemetry.NewEvents(m.bus, bus.EventSubject, "rolloutd", plain)
	m.log = slog.New(m.events.Handler(handler))
	group.Add("events", m.events.Run)
	m.keys, m.projects = apikey.NewRing(m.syncKeys, plain), apikey.NewProjects(m.projectOf)
	var err error
	m.server, err = rpc.NewServer(rpc.ServerOptions{Log: plain, Token: m.endpoints.token, Keys: m.keys, Workers: m.endpoints.workers, Projects: m.projects, TLS: serves(m.certs), Drain: m.cfg.Drain})
	if err != nil {
		return err
	}
	addr, err := listen(ctx, "listen", m.cfg.Listen, lastPort(m.cfg.StateDir, "grpc"), m.server.Listen)
	if err != nil {
		return err
	}
	m.endpoints.grpc = advertised(m.cfg.Host, addr)
	m.dialer = rpc.NewDialer(rpc.DialerOptions{
		Local: m.server, Hosted: m.localServices(targets), Lookup: m.discovery.Resolver(), Token: m.endpoints.token, TLS: m.certs, Log: plain,
	})
	m.endpoints.workers.Follow(m.standingOf)
	group.Add("keys", m.keys.Run)
	group.Add("rpc", m.server.Run)
	return nil
}

// localServices returns the hosted services that are not elected: this process always answers for
// them.
func (m *mesh) localServices(targets []target) []string {
	return slices.DeleteFunc(serviceNames(targets), m.elected)
}

// addServices constructs the hosted services in the order of the table. It returns the URL of the
// gateway if that is hosted.
func (m *mesh) addServices(ctx context.Context, targets []target, group *lifecycle.Group) (gateway string, closeStores func(), err error) {
	var closers []func() error
	closeStores = func() {
		for i := len(closers) - 1; i >= 0; i-- {
			if err := closers[i](); err != nil {
				m.log.Warn("a store did not close", "error", err)
			}
		}
	}
	for _, t := range targets {
		if t.make == nil {
			continue
		}
		h, err := t.make(ctx, m)
		if h.close != nil {
			closers = append(closers, h.close)
		}
		if err != nil {
			return "", closeStores, fmt.Errorf("make %s: %w", t.name, err)
		}
		h.service.Register(m.server)
		group.Add(t.name, h.service.Run)
		if h.url != "" {
			gateway = h.url
		}
	}
	return gateway, closeStores, nil
}

// logger returns the logger of a service.
func (m *mesh) logger(service string) *slog.Logger { return m.log.With(telemetry.AttrService, service) }

// advertised returns the host:port that other processes use to reach addr.
func advertised(host string, addr *net.TCPAddr) string {
	if host == "" {
		host = addr.IP.String()
		if addr.IP.IsUnspecified() {
			if name, err := os.Hostname(); err == nil {
				host = name
			}
		}
	}
	return net.JoinHostPort(host, fmt.Sprint(addr.Port))
}
