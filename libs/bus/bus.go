// Package bus is the streams between processes: NATS JetStream, in this process (StartEmbedded) or anywhere (Connect).
//
// A message body is one protobuf message; the trace context travels in the headers. Streams and consumers with the reasons for
// their settings stand in streams.go.
package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors of the bus, compared with errors.Is.
var (
	ErrUnavailable = rpcerr.New(codes.Unavailable, "BUS_UNAVAILABLE", "the NATS server does not answer").RetryAfter(time.Second)
	ErrNoStream    = rpcerr.New(codes.NotFound, "BUS_STREAM_NOT_FOUND", "no such stream or consumer; EnsureRun makes those of a run")
	ErrToken       = rpcerr.New(codes.Unauthenticated, "BUS_UNAUTHENTICATED", "the NATS server refused the token")
	ErrTooLarge    = rpcerr.New(codes.InvalidArgument, "BUS_MESSAGE_TOO_LARGE", "the message is above the bus's limit")
	ErrBody        = rpcerr.New(codes.InvalidArgument, "BUS_BAD_BODY", "the message's body is not of the expected type")
)

// maxAsync is how many publishes may wait for their acks; more block the publisher.
const maxAsync = 1024

// Bus is a connection. Its methods may be called from many goroutines. It reconnects for ever; meanwhile calls wait until
// their context ends.
type Bus struct {
	nc  *nats.Conn
	js  jetstream.JetStream
	log *slog.Logger
}

// Connect connects to url, trying again until ctx ends while nobody listens there. A refused token fails at once (ErrToken).
// log may be nil.
func Connect(ctx context.Context, url, token string, log *slog.Logger) (*Bus, error) {
	log = orDiscard(log)
	options := []nats.Option{
		nats.Name("rollout"),
		nats.Token(token),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(100 * time.Millisecond),
		nats.ReconnectJitter(50*time.Millisecond, 50*time.Millisecond),
		nats.PingInterval(5 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("bus disconnected, reconnecting", "url", url, "error", err)
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) { log.Info("bus reconnected", "url", url) }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { log.Debug("bus", "error", err) }),
	}
	delay := 20 * time.Millisecond
	for {
		nc, err := nats.Connect(url, options...)
		if err == nil {
			js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(maxAsync), jetstream.WithDefaultTimeout(10*time.Second))
			if err != nil {
				nc.Close()
				return nil, fmt.Errorf("connect to the bus at %s: %w", url, err)
			}
			return &Bus{nc: nc, js: js, log: log}, nil
		}
		if errors.Is(err, nats.ErrAuthorization) {
			return nil, fmt.Errorf("connect to the bus at %s: %w", url, ErrToken)
		}
		timer := time.NewTimer(delay)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, fmt.Errorf("connect to the bus at %s: %w", url, ErrUnavailable.Wrap(err))
		case <-timer.C:
			delay = min(2*delay, time.Second)
		}
	}
}

// Close sends what is buffered and closes the connection.
func (b *Bus) Close() {
	if b.nc.IsConnected() {
		_ = b.nc.FlushTimeout(time.Second) // what was published with an ack is there already
	}
	b.nc.Close()
}

// Conn is the plain NATS connection.
func (b *Bus) Conn() *nats.Conn { return b.nc }

// JetStream is the client below this package, for what it does not wrap.
func (b *Bus) JetStream() jetstream.JetStream { return b.js }

// Healthy reports whether the connection is up.
func (b *Bus) Healthy() bool { return b.nc.IsConnected() }

// mapError turns the client's errors into this package's; context errors stay.
func mapError(err error) error {
	switch {
	case err == nil, errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrConsumerNotFound),
		errors.Is(err, jetstream.ErrConsumerDeleted), errors.Is(err, jetstream.ErrNoStreamResponse):
		return ErrNoStream.Wrap(err)
	case errors.Is(err, nats.ErrMaxPayload):
		return ErrTooLarge.Wrap(err)
	case errors.Is(err, nats.ErrNoResponders), errors.Is(err, nats.ErrTimeout), errors.Is(err, nats.ErrConnectionClosed),
		errors.Is(err, nats.ErrDisconnected), errors.Is(err, jetstream.ErrNoHeartbeat), errors.Is(err, nats.ErrConnectionReconnecting),
		errors.Is(err, jetstream.ErrServerShutdown), errors.Is(err, jetstream.ErrJetStreamNotEnabled),
		errors.Is(err, nats.ErrReconnectBufExceeded):
		return ErrUnavailable.Wrap(err)
	}
	return err
}
