package bus

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/rollout-rl/rollout/libs/cert"
)

// Options configures a connection. Token, User with Password, and NKeySeed are alternatives.
type Options struct {
	URL            string // "nats://host:4222", "tls://.." asks for TLS; nodes of one cluster are separated by commas
	Token          string
	User, Password string
	NKeySeed       string       // "SU..."; the server has the public key
	TLS            *cert.Source // nil: tls:// URLs trust the system's authorities
	// Replicas of each stream; 0: three in a cluster that has so many nodes, else as many as it has.
	Replicas int
	Log      *slog.Logger // nil discards
}

func (o Options) options(log *slog.Logger) ([]nats.Option, error) {
	options := []nats.Option{
		nats.Name("rollout"),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(100 * time.Millisecond),
		nats.ReconnectJitter(50*time.Millisecond, 50*time.Millisecond),
		nats.PingInterval(5 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("bus disconnected, reconnecting", "url", o.URL, "error", err)
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) { log.Info("bus reconnected", "url", nc.ConnectedUrlRedacted()) }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { log.Debug("bus", "error", err) }),
	}
	if o.TLS != nil {
		pair := func() (tls.Certificate, error) { return o.TLS.Pair(), nil }
		if o.TLS.Files().Cert == "" {
			pair = nil
		}
		options = append(options, nats.ClientTLSConfig(pair, func() (*x509.CertPool, error) { return o.TLS.Roots(), nil })) // called for each connection
	}
	switch {
	case o.NKeySeed != "":
		pair, err := nkeys.FromSeed([]byte(o.NKeySeed))
		if err != nil {
			return nil, fmt.Errorf("the NKEY seed of the bus: %w", ErrToken.Wrap(err))
		}
		public, err := pair.PublicKey()
		if err != nil {
			return nil, fmt.Errorf("the NKEY seed of the bus: %w", ErrToken.Wrap(err))
		}
		options = append(options, nats.Nkey(public, pair.Sign))
	case o.User != "":
		options = append(options, nats.UserInfo(o.User, o.Password))
	case o.Token != "":
		options = append(options, nats.Token(o.Token))
	}
	return options, nil
}

// refusal returns the error of a connection that a retry cannot fix; nil if a retry may succeed.
func refusal(err error) error {
	var unknown x509.UnknownAuthorityError
	var host x509.HostnameError
	var invalid x509.CertificateInvalidError
	var record tls.RecordHeaderError
	var alert *net.OpError // with the text "remote error": an alert of the peer, whose type is not exported
	switch {
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrNkeysNotSupported), errors.Is(err, nats.ErrAuthExpired):
		return ErrToken
	case errors.Is(err, nats.ErrSecureConnRequired), errors.Is(err, nats.ErrSecureConnWanted), errors.As(err, &unknown), errors.As(err, &host),
		errors.As(err, &invalid), errors.As(err, &record), errors.As(err, &alert) && alert.Op == "remote error":
		return ErrTLS.Wrap(err)
	}
	return nil
}
