package storage

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/bus"
)

// Config sets the service.
type Config struct {
	// Fetch is how many messages of the stream are stored in one transaction at most. 0: 256.
	Fetch int
	// Page is how many events a tail reads at a time. 0: 500.
	Page int
}

func (c *Config) defaults() {
	if c.Fetch <= 0 {
		c.Fetch = 256
	}
	if c.Page <= 0 {
		c.Page = 500
	}
}

// Stream is what the service needs of the bus.
type Stream interface {
	EnsureEvents(ctx context.Context) error
	Events(ctx context.Context) (*bus.Consumer, error)
}

// Deps are the service's surroundings.
type Deps struct {
	Store     Store
	Artifacts *blob.CAS
	Stream    Stream       // nil: events come by AppendEvents alone
	Log       *slog.Logger // nil discards
	Now       func() time.Time
}

func (d *Deps) check() error {
	if d.Store == nil || d.Artifacts == nil {
		return errors.New("storage: event store and artifacts are needed")
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	return nil
}
