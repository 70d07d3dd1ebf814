package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/cmd/internal/backend"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/discovery/registry"
	"github.com/rollout-rl/rollout/libs/disk"
	"github.com/rollout-rl/rollout/libs/lifecycle"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/services/scheduler"
)

const (
	natsTarget     = "nats"
	registryTarget = "registry"
	// connectTimeout is how long to wait for servers in other processes, which may be starting too.
	connectTimeout = 30 * time.Second
	joinPoll       = 20 * time.Millisecond
)

var errUnavailable = rpcerr.New(codes.Unavailable, "ROLLOUTD_NO_SERVERS", "NATS or the registry cannot be reached")

// endpoints holds the addresses of all servers, and their credentials.
type endpoints struct {
	token       string // the mesh token
	workers     *credential.Authority
	tokenFile   string
	grpc        string      // host:port of this process
	nats        string      // URL
	natsAccess  bus.Options // credentials and TLS for NATS
	natsToken   config.Ref  // where the token of natsAccess is; empty: workers use their own credentials
	consul      string      // host:port, with the prefix https:// if it uses TLS
	consulToken string
	consulRef   config.Ref // where a configured one is
}

// startServers starts the embedded servers that this process hosts and finds the others. stop,
// which is never nil, stops what was started.
func (m *mesh) startServers(ctx context.Context, targets []target, group *lifecycle.Group, log *slog.Logger) (stop func(), err error) {
	var stops []func()
	stop = func() {
		for i := len(stops) - 1; i >= 0; i-- {
			stops[i]()
		}
	}
	e := &m.endpoints
	if err := e.find(ctx, m.cfg, targets, m.environ); err != nil {
		return stop, err
	}
	if hosts(targets, natsTarget) {
		srv, err := startNATS(ctx, m.cfg, bus.EmbeddedOptions{Token: e.natsAccess.Token, Workers: e.workers, NoSync: !m.cfg.NATS.Sync, TLS: mutual(m.certs), Log: log})
		if err != nil {
			return stop, err
		}
		e.nats = srv.URL()
		stops = append(stops, srv.Stop) // after all components have ended
		reserve := disk.NewReserve(natsDir(m.cfg.StateDir), 0)
		group.Add(natsTarget, func(ctx context.Context) error {
			srv.Run(ctx, func() bool { return reserve.Missing(0, "", false) == "" })
			return nil
		})
	}
	if e.natsAccess.TLS == nil && encrypted(e.nats) && m.cfg.NATS.URL == "" {
		e.natsAccess.TLS = mutual(m.certs)
	}
	if hosts(targets, registryTarget) {
		r := registry.NewScoped(e.consulToken, e.runOf)
		lis, err := listen(ctx, "consul.listen", m.cfg.Consul.Listen, lastPort(m.cfg.StateDir, "consul"), listenTCP)
		if err != nil {
			return stop, fmt.Errorf("listen for the registry: %w", err)
		}
		srv := &http.Server{
			Handler: r.Handler(), ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug), // of probes
		}
		served := make(chan error, 1)
		go func() { served <- secureHTTP(srv, lis, mutual(m.certs)) }()
		e.consul = advertised(m.cfg.Host, lis.Addr().(*net.TCPAddr))
		if mutual(m.certs) != nil {
			e.consul = "https://" + e.consul
		}
		stops = append(stops, func() { r.Close(); _ = srv.Close() })
		group.Add(registryTarget, func(ctx context.Context) error {
			select {
			case err := <-served:
				return fmt.Errorf("serve the registry: %w", err)
			case <-ctx.Done():
				return nil
			}
		})
	}
	return stop, nil
}

// find sets what is known before a server is started: tokens, and servers of other processes.
func (e *endpoints) find(ctx context.Context, cfg config.Config, targets []target, environ []string) error {
	ownNATS, ownRegistry := hosts(targets, natsTarget), hosts(targets, registryTarget)
	e.nats, e.consul, e.tokenFile = cfg.NATS.URL, cfg.Consul.Address, cfg.TokenFile
	if cfg.Join != "" {
		joined, err := awaitJoined(ctx, cfg.Join, e.nats == "" && !ownNATS, e.consul == "" && !ownRegistry)
		if err != nil {
			return err
		}
		e.nats, e.consul = first(e.nats, joined.NATS), first(e.consul, joined.Consul)
		e.tokenFile = first(e.tokenFile, joined.TokenFile)
	}
	var err error
	if e.tokenFile == "" {
		e.tokenFile = tokenFile(cfg.StateDir)
		e.token, err = rpc.EnsureToken(e.tokenFile)
	} else {
		e.token, err = rpc.ReadToken(e.tokenFile)
	}
	if err != nil {
		return err
	}
	e.workers = credential.NewAuthority(e.token, nil)
	if e.natsAccess, err = backend.NATS(cfg.NATS, e.token, environ); err != nil {
		return err
	}
	e.natsToken, e.consulRef = cfg.NATS.Token, cfg.Consul.Token
	if cfg.Consul.Address == "" { // an embedded registry, of this process or the joined one
		e.consulToken = e.token
	}
	token, err := cfg.Consul.Token.Read("consul.token", environ)
	e.consulToken = first(token, e.consulToken)
	return err
}

// runOf returns the run of a worker's credential; false if the text is none that is in force.
func (e *endpoints) runOf(ctx context.Context, text string) (run string, ok bool) {
	claims, ok, err := e.workers.Check(ctx, text)
	return claims.Run, ok && err == nil && claims.Role != credential.Peer
}

// workerTokens returns the tokens of workers for NATS and the registry: references, or
// scheduler.OwnCredential where the mesh token is the token of services.
func (e *endpoints) workerTokens(cfg config.Config) (nats, consul string) {
	nats, consul = e.natsToken.String(), e.consulRef.String()
	if nats == "" && e.natsAccess.Token != "" {
		nats = scheduler.OwnCredential
	}
	if consul == "" && cfg.Consul.Address == "" {
		consul = scheduler.OwnCredential
	}
	return nats, consul
}

// ownRegistry reports whether the registry is an embedded one.
func (m *mesh) ownRegistry() bool { return m.cfg.Consul.Address == "" }

func first(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// awaitJoined waits until the joined process serves, and returns its runtime file. Both may have
// been started together, and the file of a killed process names ports without a server.
func awaitJoined(ctx context.Context, dir string, nats, consul bool) (config.Runtime, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	tick := time.NewTicker(joinPoll)
	defer tick.Stop()
	var last error
	for {
		r, err := config.ReadRuntime(config.RuntimeFile(dir))
		if err == nil {
			if err = answers(ctx, r, nats, consul); err == nil {
				return r, nil
			}
		}
		last = err
		select {
		case <-ctx.Done():
			return r, fmt.Errorf("join %s: no rolloutd is serving after %v: %w", dir, connectTimeout, errUnavailable.Wrap(last))
		case <-tick.C:
		}
	}
}

// answers returns an error unless the servers of r listen: of a NATS cluster, at least one.
func answers(ctx context.Context, r config.Runtime, nats, consul bool) error {
	if nats {
		if r.NATS == "" {
			return errors.New("the joined process has no NATS server")
		}
		if err := anyListens(ctx, strings.Split(r.NATS, ",")); err != nil {
			return err
		}
	}
	if consul {
		return anyListens(ctx, []string{r.Consul})
	}
	return nil
}

func anyListens(ctx context.Context, urls []string) (err error) {
	for _, address := range urls {
		if _, rest, found := strings.Cut(address, "://"); found {
			address = rest
		}
		d := net.Dialer{Timeout: time.Second}
		conn, dialErr := d.DialContext(ctx, "tcp", strings.TrimSpace(address))
		if dialErr == nil {
			return conn.Close()
		}
		err = errors.Join(err, dialErr)
	}
	return err
}

func startNATS(ctx context.Context, cfg config.Config, o bus.EmbeddedOptions) (*bus.Embedded, error) {
	// Listen briefly to find a free port, preferably the last one, with which workers and other
	// processes find the server again after a restart.
	lis, err := listen(ctx, "nats.listen", cfg.NATS.Listen, lastPort(cfg.StateDir, "nats"), listenTCP)
	if err != nil {
		return nil, fmt.Errorf("listen for NATS: %w", err)
	}
	addr := lis.Addr().(*net.TCPAddr)
	lis.Close()
	o.Host, o.Port = addr.IP.String(), addr.Port
	return bus.StartEmbedded(natsDir(cfg.StateDir), o)
}

var errListen = rpcerr.New(codes.Unavailable, "ROLLOUTD_ADDRESS", "cannot listen on an address")

// listen listens on the address of a configuration key. For port 0 it tries the last port first.
// The error is errListen.
func listen[L any](ctx context.Context, key, address string, last int, take func(context.Context, string) (L, error)) (L, error) {
	host, port, err := net.SplitHostPort(address)
	if err == nil && port == "0" && last > 0 {
		if l, err := take(ctx, net.JoinHostPort(host, fmt.Sprint(last))); err == nil {
			return l, nil
		}
	}
	l, err := take(ctx, address)
	if err != nil {
		err = errListen.WithMessage("%s: cannot listen on %s", key, address).Wrap(err).
			Fix("stop the process that uses the port, or set " + key + " to another address; port 0 selects a free port")
	}
	return l, err
}

func listenTCP(ctx context.Context, address string) (net.Listener, error) {
	return (&net.ListenConfig{}).Listen(ctx, "tcp", address)
}
