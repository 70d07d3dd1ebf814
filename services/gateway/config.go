package gateway

import (
	"errors"
	"io"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/cert"
	workers "github.com/rollout-rl/rollout/libs/worker"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Config configures the service.
type Config struct {
	// Address is the address of the HTTP listener. "": 127.0.0.1:0.
	Address string
	// TLS is the certificate of the HTTP listener; nil: plain text.
	TLS *cert.Source
	// Keys are required as bearer tokens. Nil: no key is needed.
	Keys *apikey.Ring
	// TrustOwner exempts connections of the user of this process, and of root, over loopback.
	TrustOwner bool
	// BodyTimeout is how long an HTTP request may take to send its body. 0: a minute.
	BodyTimeout time.Duration
	// QueueTimeout is how long a request waits for a worker; 0: DefaultQueueTimeout.
	QueueTimeout time.Duration
}

// DefaultQueueTimeout is how long a request waits for a worker. It is longer than a worker takes to
// start again after a crash with a small model, and shorter than the timeouts of clients.
const DefaultQueueTimeout = 30 * time.Second

// Conn is a connection to a worker.
type Conn interface {
	grpc.ClientConnInterface
	io.Closer
}

// Deps are the dependencies of the service.
type Deps struct {
	Store    Store
	Registry workers.Registry
	// Scheduler verifies registrations: requests go only to processes that it launched.
	Scheduler workers.Verifier
	// Work, Buffer, and Runs serve agents outside of the runs; all nil: there are none.
	Work   Work
	Buffer bufferv1.BufferServiceClient
	Runs   runv1.SchedulerServiceClient
	// Dial connects to a worker at host:port; calls carry the token that the workers of its run
	// accept.
	Dial     func(run string, incarnation uint32, address string) (Conn, error)
	Log      *slog.Logger         // nil discards
	Now      func() time.Time     // nil: time.Now
	Projects *apikey.Projects     // nil: keys see the runs of all projects
	Meters   metric.MeterProvider // nil: the global one
}

func (d *Deps) check() error {
	if d.Store == nil || d.Registry == nil || d.Scheduler == nil || d.Dial == nil {
		return errors.New("gateway: missing dependency: store, registry, scheduler, or dialer of workers")
	}
	if (d.Work == nil) != (d.Runs == nil) || (d.Work == nil) != (d.Buffer == nil) {
		return errors.New("gateway: work, buffer, and runs serve agents together: set all of them, or none")
	}
	if d.Projects != nil {
		d.Store = projectStore{Store: d.Store, projects: d.Projects}
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.Meters == nil {
		d.Meters = otel.GetMeterProvider()
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	return nil
}
