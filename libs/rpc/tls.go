package rpc

import (
	"context"
	"log/slog"
	"net"
	"sync"

	"google.golang.org/grpc/credentials"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// handshake is TLS with current certificates: each connection uses the present content of the
// files. In-memory connections do not use it.
type handshake struct {
	source *cert.Source
	log    *slog.Logger
	logged *sync.Map // failures that were logged
}

// Credentials is how a Server or a client uses a Source. log may be nil.
func Credentials(source *cert.Source, log *slog.Logger) credentials.TransportCredentials {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return handshake{source, log, &sync.Map{}}
}

// ClientHandshake implements credentials.TransportCredentials. Its errors explain the problem and
// the fix.
func (h handshake) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := credentials.NewTLS(h.source.Client()).ClientHandshake(ctx, authority, raw)
	if err = cert.Explain(err); err != nil {
		h.tell("no TLS connection to a server", authority, err)
		return nil, nil, err
	}
	h.logged.Clear() // log each failure once per configuration
	return conn, info, nil
}

// ServerHandshake implements credentials.TransportCredentials.
func (h handshake) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if raw.LocalAddr().Network() == "bufconn" {
		return raw, nil, nil
	}
	conn, info, err := credentials.NewTLS(h.source.Server("h2")).ServerHandshake(raw)
	if err != nil {
		host, _, _ := net.SplitHostPort(raw.RemoteAddr().String())
		h.tell("no TLS connection with a client", host, cert.Refusal(err))
	}
	return conn, info, err
}

// tell logs each reason of a peer once, because a failing client retries several times per second.
// A connection that only ends is not logged.
func (h handshake) tell(what, peer string, err error) {
	reason := rpcerr.Reason(err)
	if reason == "" {
		h.log.Debug(what, "peer", peer, "error", err)
		return
	}
	if _, known := h.logged.LoadOrStore(peer+" "+reason, true); !known {
		h.log.Warn(what, "peer", peer, "error", err, "fix", rpcerr.Fix(err))
	}
}

// Info implements credentials.TransportCredentials.
func (h handshake) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (h handshake) Clone() credentials.TransportCredentials { return h }

// OverrideServerName implements credentials.TransportCredentials. The name comes from the
// connection's authority.
func (h handshake) OverrideServerName(string) error { return nil }
