package storage

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/bus"
)

// Config configures the service.
type Config struct {
	// Fetch is the largest number of messages that are stored in one transaction. 0: 256.
	Fetch int
	// Page is how many events a tail reads at a time. 0: 500.
	Page int
	// TrimEvery is the interval at which stored events are removed from the stream. 0: a minute.
	TrimEvery time.Duration
	// Recent is how long telemetry is kept for each second. 0: an hour.
	Recent time.Duration
	// Fine is how long telemetry is kept for each ten seconds; then for each five minutes. 0: a day.
	Fine time.Duration
	// EventAge is the age at which events are deleted. 0: never.
	EventAge time.Duration
}

func (c *Config) defaults() {
	if c.Fetch <= 0 {
		c.Fetch = 256
	}
	if c.Page <= 0 {
		c.Page = 500
	}
	if c.Recent <= 0 {
		c.Recent = time.Hour
	}
	if c.Fine <= 0 {
		c.Fine = 24 * time.Hour
	}
	if c.TrimEvery <= 0 {
		c.TrimEvery = time.Minute
	}
}

// Stream is the part of the bus that the service uses.
type Stream interface {
	EnsureEvents(ctx context.Context) error
	Events(ctx context.Context) (*bus.Consumer, error)
	TrimEvents(ctx context.Context) error
}

// Deps are the dependencies of the service.
type Deps struct {
	Store     Store
	Artifacts *blob.CAS
	Projects  *apikey.Projects // nil: keys see the events of all projects
	Stream    Stream           // nil: events only arrive by AppendEvents
	Log       *slog.Logger     // nil discards
	Now       func() time.Time
}

func (d *Deps) check() error {
	if d.Store == nil || d.Artifacts == nil {
		return errors.New("storage: missing dependency: event store or artifacts")
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	return nil
}
