package bus

import (
	"context"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/proto/gen/names"
)

// EmbeddedOptions configures the embedded server. The zero value means loopback, a free port, and
// no token.
type EmbeddedOptions struct {
	Host  string // "" is 127.0.0.1
	Port  int    // 0 picks a free port
	Token string // required from every client; "" for none
	// Workers decides about the credentials of workers. With one as token a client reaches the
	// subjects of its run only, and its connection is closed when the credential is not in force any
	// more. nil: no such tokens
	Workers *credential.Authority
	TLS     *cert.Source // of the listener; nil: plain text
	// NoSync skips the fsync of each stored message: acknowledged messages then survive the death of
	// the process, but not a power cut.
	NoSync bool
	Log    *slog.Logger // nil discards
}

// Embedded is a nats-server with JetStream inside this process. Safe for concurrent use.
type Embedded struct {
	dir     string
	options EmbeddedOptions
	url     string

	mu      sync.Mutex
	srv     *server.Server // nil: it could not be started again
	stopped bool
}

const (
	readyTimeout = 10 * time.Second
	tlsTimeout   = 5 * time.Second // of a handshake; the default of 2 s is too short for a busy host
	healthEvery  = time.Second     // the interval at which Run checks the streams and the credentials
	// connectionsPage is how many connections are read at once.
	connectionsPage = 1024
)

// StartEmbedded starts a server that keeps its streams in files under dir, and returns when it
// accepts connections, after about 30 ms. It restores the streams that are in dir. Use one server
// per dir.
func StartEmbedded(dir string, o EmbeddedOptions) (*Embedded, error) {
	if o.Host == "" {
		o.Host = "127.0.0.1"
	}
	if o.Port == 0 {
		o.Port = server.RANDOM_PORT
	}
	e := &Embedded{dir: dir, options: o}
	if err := e.start(); err != nil {
		return nil, err
	}
	e.url = e.srv.ClientURL()
	e.options.Port = e.srv.Addr().(*net.TCPAddr).Port
	return e, nil
}

// start starts a server. The caller has the lock, if others know e.
func (e *Embedded) start() error {
	o := e.options
	if err := os.MkdirAll(e.dir, 0o700); err != nil {
		return fmt.Errorf("start nats: %w", err)
	}
	var secure *tls.Config
	if o.TLS != nil {
		secure = o.TLS.Mesh()
	}
	srv, err := server.NewServer(&server.Options{
		ServerName:                 "rollout",
		Host:                       o.Host,
		Port:                       o.Port,
		CustomClientAuthentication: authorization{token: o.Token, workers: o.Workers},
		TLSConfig:                  secure,
		TLSTimeout:                 tlsTimeout.Seconds(),
		JetStream:                  true,
		StoreDir:                   filepath.Clean(e.dir),
		JetStreamMaxMemory:         64 << 20, // every stream is in files
		JetStreamMaxStore:          1 << 40,  // the disk is the limit; streams bound themselves
		SyncAlways:                 !o.NoSync,
		MaxPayload:                 MaxPayload,
		MaxPending:                 256 << 20,
		WriteDeadline:              10 * time.Second,
		DisableShortFirstPing:      true,
		NoSigs:                     true, // signals belong to the process
	})
	if err != nil {
		return fmt.Errorf("start nats: %w", err)
	}
	srv.SetLoggerV2(logger{orDiscard(o.Log)}, false, false, false)
	go srv.Start() // returns once the server listens; Stop waits for its goroutines
	if !srv.ReadyForConnections(readyTimeout) {
		srv.Shutdown()
		return fmt.Errorf("start nats: not ready after %v; is another process using %s or port %d?", readyTimeout, e.dir, o.Port)
	}
	if !srv.JetStreamEnabled() {
		srv.Shutdown()
		return errors.New("start nats: JetStream could not start; the log has the reason")
	}
	e.srv = srv
	return nil
}

// authorization checks the tokens of clients.
type authorization struct {
	token   string
	workers *credential.Authority
}

// Check implements server.Authentication.
func (a authorization) Check(c server.ClientAuthentication) bool {
	given := c.GetOpts().Token
	if a.token == "" || subtle.ConstantTimeCompare([]byte(given), []byte(a.token)) == 1 {
		return true
	}
	if a.workers == nil {
		return false
	}
	claims, ok, err := a.workers.Check(context.Background(), given)
	if !ok || err != nil || claims.Role == credential.Peer {
		return false
	}
	c.RegisterUser(&server.User{Username: claims.String(), Permissions: permissions(claims.Run)})
	return true
}

// expel closes the connections of workers whose credentials are not in force any more. A worker
// that has a renewed one connects again.
func (e *Embedded) expel(ctx context.Context) {
	e.mu.Lock()
	srv := e.srv
	e.mu.Unlock()
	if srv == nil || e.options.Workers == nil {
		return
	}
	for offset := 0; ; offset += connectionsPage {
		page, err := srv.Connz(&server.ConnzOptions{Username: true, Offset: offset, Limit: connectionsPage})
		if err != nil || len(page.Conns) == 0 {
			return
		}
		for _, conn := range page.Conns {
			claims, worker := credential.Parse(conn.AuthorizedUser)
			if !worker {
				continue
			}
			if err := e.options.Workers.InForce(ctx, claims); err != nil {
				orDiscard(e.options.Log).Info("the connection of a worker to NATS is closed", "worker", conn.Name, "error", err)
				_ = srv.DisconnectClientByID(conn.Cid) // it has left otherwise
			}
		}
	}
}

// permissions are what the workers of a run do: pull work, acknowledge it, share it, exchange
// batches with environments, and send trajectories and events. Answers arrive in inboxes that no
// other run may listen on.
func permissions(run string) *server.Permissions {
	inbox, idle := "_INBOX_"+run+".>", names.IdleSubject(run)
	items, acks := names.ExchangeSubject(run)+".>", names.ExchangeAcksSubject(run)+".>"
	return &server.Permissions{
		Publish: &server.SubjectPermission{Allow: []string{
			names.TrajSubject(run), idle, names.RunEventSubject(run), inbox, items, acks,
			"$JS.API.CONSUMER.MSG.NEXT." + names.WorkStream(run) + "." + names.WorkersConsumer, "$JS.API.STREAM.INFO." + names.WorkStream(run),
			"$JS.API.STREAM.INFO." + names.TrajStream(run), "$JS.ACK." + names.WorkStream(run) + ".>", "$JS.ACK.*.*." + names.WorkStream(run) + ".>",
		}},
		Subscribe: &server.SubjectPermission{Allow: []string{inbox, idle, idle + " >", items, acks}},
	}
}

// URL is the address for clients, "nats://127.0.0.1:PORT", or tls:// with TLS. It contains no
// token.
func (e *Embedded) URL() string { return e.url }

// Run starts the server again, on the same port, after a stream failed to write to a full disk and
// space says that the disk has space again: a stream keeps its first error and refuses every later
// message. Clients reconnect by themselves. Run also closes the connections of workers whose
// credentials are not in force any more. It returns when ctx ends.
func (e *Embedded) Run(ctx context.Context, space func() bool) {
	ticker := time.NewTicker(healthEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if !e.Writes() && space() {
			e.reopen()
		}
		e.expel(ctx)
	}
}

// Writes reports whether no stream has failed to write since the server started.
func (e *Embedded) Writes() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.srv == nil {
		return e.stopped
	}
	health := e.srv.Healthz(&server.HealthzOptions{Details: true})
	return e.srv.JetStreamEnabled() && !slices.ContainsFunc(health.Errors, func(found server.HealthzError) bool {
		return strings.Contains(found.Error, "write error") // the server gives no code for it
	})
}

// reopen restarts the server.
func (e *Embedded) reopen() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped {
		return
	}
	log := orDiscard(e.options.Log)
	log.Warn("NATS could not write to a full disk; it is started again, because there is space")
	e.shutdown()
	if err := e.start(); err != nil {
		log.Error("NATS could not be started again, which is retried", "error", err)
	}
}

// Stop stops the server and waits for it. Streams stay in their directory.
func (e *Embedded) Stop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopped = true
	e.shutdown()
}

func (e *Embedded) shutdown() {
	if e.srv != nil {
		e.srv.Shutdown()
		e.srv.WaitForShutdown()
		e.srv = nil
	}
}

// logger writes the server's log to slog.
type logger struct{ log *slog.Logger }

func (l logger) Noticef(f string, a ...any) { l.log.Debug(fmt.Sprintf(f, a...)) }
func (l logger) Warnf(f string, a ...any)   { l.log.Warn(fmt.Sprintf(f, a...)) }
func (l logger) Errorf(f string, a ...any) {
	text := fmt.Sprintf(f, a...)
	if strings.Contains(text, "TLS handshake error") { // a refused client, or a port probe
		l.log.Debug(text)
		return
	}
	l.log.Error(text)
}
func (l logger) Fatalf(f string, a ...any) { l.log.Error(fmt.Sprintf(f, a...)) }
func (l logger) Debugf(string, ...any)     {}
func (l logger) Tracef(string, ...any)     {}

func orDiscard(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}
