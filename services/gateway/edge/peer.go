package edge

import (
	"context"
	"net"
	"net/http"
	"os"
	"sync"

	"github.com/rollout-rl/rollout/libs/peeruid"
)

// peerKey is the context key of a function that returns the user at the other end of a connection.
type peerKey struct{}

// WithPeer is the ConnContext of an http.Server whose Handler has TrustOwner. The user is looked up
// once per connection, when a request without a valid key needs it.
func WithPeer(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, peerKey{}, sync.OnceValues(func() (uint32, bool) { return peeruid.Of(conn) }))
}

// fromOwner reports whether the peer is the user of this process or root.
func fromOwner(ctx context.Context) bool {
	uid, ok := peerOf(ctx)
	return ok && (uid == 0 || int(uid) == os.Geteuid())
}

func peerOf(ctx context.Context) (uid uint32, ok bool) {
	peer, ok := ctx.Value(peerKey{}).(func() (uint32, bool))
	if !ok {
		return 0, false
	}
	return peer()
}

// noKey is the error of a request without a valid key.
func (e *Edge) noKey(ctx context.Context) *Error {
	message := "missing or incorrect API key; send it as `Authorization: Bearer KEY` (`rollout keys create` makes one)"
	switch _, known := peerOf(ctx); {
	case !e.TrustOwner:
	case known:
		message += "; only the user who runs rolloutd, and root, need no key on this host"
	default:
		message += "; the user at the other end of the connection is unknown, so that a key is needed on loopback too"
	}
	return &Error{Status: http.StatusUnauthorized, Code: "invalid_api_key", Message: message}
}
