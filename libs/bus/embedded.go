package bus

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/rollout-rl/rollout/libs/cert"
)

// EmbeddedOptions configures the embedded server. The zero value means loopback, a free port, and
// no token.
type EmbeddedOptions struct {
	Host  string       // "" is 127.0.0.1
	Port  int          // 0 picks a free port
	Token string       // required from every client; "" for none
	TLS   *cert.Source // of the listener; nil: plain text
	// NoSync skips the fsync of each stored message: acknowledged messages then survive the death of
	// the process, but not a power cut.
	NoSync bool
	Log    *slog.Logger // nil discards
}

// Embedded is a nats-server with JetStream inside this process.
type Embedded struct {
	srv *server.Server
	url string
}

const (
	readyTimeout = 10 * time.Second
	tlsTimeout   = 5 * time.Second // of a handshake; the default of 2 s is too short for a busy host
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
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("start nats: %w", err)
	}
	var secure *tls.Config
	if o.TLS != nil {
		secure = o.TLS.Mesh()
	}
	srv, err := server.NewServer(&server.Options{
		ServerName:            "rollout",
		Host:                  o.Host,
		Port:                  o.Port,
		Authorization:         o.Token,
		TLSConfig:             secure,
		TLSTimeout:            tlsTimeout.Seconds(),
		JetStream:             true,
		StoreDir:              filepath.Clean(dir),
		JetStreamMaxMemory:    64 << 20, // every stream is in files
		JetStreamMaxStore:     1 << 40,  // the disk is the limit; streams bound themselves
		SyncAlways:            !o.NoSync,
		MaxPayload:            MaxPayload,
		MaxPending:            256 << 20,
		WriteDeadline:         10 * time.Second,
		DisableShortFirstPing: true,
		NoSigs:                true, // signals belong to the process
	})
	if err != nil {
		return nil, fmt.Errorf("start nats: %w", err)
	}
	srv.SetLoggerV2(logger{orDiscard(o.Log)}, false, false, false)
	go srv.Start() // returns once the server listens; Stop waits for its goroutines
	if !srv.ReadyForConnections(readyTimeout) {
		srv.Shutdown()
		return nil, fmt.Errorf("start nats: not ready after %v; is another process using %s or port %d?", readyTimeout, dir, o.Port)
	}
	if !srv.JetStreamEnabled() {
		srv.Shutdown()
		return nil, errors.New("start nats: JetStream could not start; the log has the reason")
	}
	return &Embedded{srv: srv, url: srv.ClientURL()}, nil
}

// URL is the address for clients, "nats://127.0.0.1:PORT", or tls:// with TLS. It contains no
// token.
func (e *Embedded) URL() string { return e.url }

// Stop stops the server and waits for it. Streams stay in their directory.
func (e *Embedded) Stop() {
	e.srv.Shutdown()
	e.srv.WaitForShutdown()
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
