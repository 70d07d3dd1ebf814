package gateway

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/discovery"
)

// Config sets the service.
type Config struct {
	// Address is where HTTP listens. "": 127.0.0.1:0.
	Address string
	// TLS is what HTTP is served with; nil: plain text.
	TLS *cert.Source
	// Keys are asked for as bearer tokens. Nil: whoever reaches the address may call; meant for loopback.
	Keys *apikey.Ring
}

// Registry tells which workers are there.
type Registry interface {
	// Watch sends the passing instances of a name at once and on every change, until ctx ends.
	Watch(ctx context.Context, name string) <-chan []discovery.Instance
}

// Conn is a connection to a worker.
type Conn interface {
	grpc.ClientConnInterface
	io.Closer
}

// Deps are the service's surroundings.
type Deps struct {
	Store    Store
	Registry Registry
	// Dial connects to a worker at host:port; calls carry the mesh token.
	Dial func(address string) (Conn, error)
	Log  *slog.Logger     // nil discards
	Now  func() time.Time // nil: time.Now
}

func (d *Deps) check() error {
	if d.Store == nil || d.Registry == nil || d.Dial == nil {
		return errors.New("gateway: store, registry and dialer of workers are needed")
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	return nil
}
