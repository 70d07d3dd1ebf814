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
	"net/http"
	"strings"
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
	ErrToken       = rpcerr.New(codes.Unauthenticated, "BUS_UNAUTHENTICATED", "the NATS server refused the credentials").
			Fix("check nats.token, nats.user with its password, or nats.nkey against the server's users")
	ErrTLS = rpcerr.New(codes.FailedPrecondition, "BUS_TLS",
		"no TLS with the NATS server: it asks for it or does not speak it, or a certificate is not of the expected authority")
	ErrReplicas = rpcerr.New(codes.FailedPrecondition, "BUS_REPLICAS",
		"the NATS servers can't keep that many replicas; add nodes or lower nats.replicas")
	ErrFull = rpcerr.New(codes.ResourceExhausted, "BUS_FULL",
		"the NATS servers have no room for it: max_file, the account's storage or the number of its streams is used up").RetryAfter(time.Second).
		Fix("raise max_file of the servers' jetstream block, or the limits of the account; `rollout doctor` says which")
	ErrLimits = rpcerr.New(codes.FailedPrecondition, "BUS_LIMITS", "the limits of the NATS account refuse a stream as rollout makes it").
			Fix("give the account no max_stream_bytes below 1 GiB and no max_bytes_required; `rollout doctor` says which")
	ErrTooLarge = rpcerr.New(codes.InvalidArgument, "BUS_MESSAGE_TOO_LARGE", "the message is above the bus's limit")
	ErrBody     = rpcerr.New(codes.InvalidArgument, "BUS_BAD_BODY", "the message's body is not of the expected type")
)

// maxAsync is how many publishes may wait for their acks; more block the publisher.
const maxAsync = 1024

// ackWait is how long the stream may take to say that it has a message. A server that died in between never does.
const ackWait = 5 * time.Second

// Bus is a connection. Its methods may be called from many goroutines. It reconnects for ever, in a cluster to any node; meanwhile
// calls wait until their context ends.
type Bus struct {
	nc       *nats.Conn
	js       jetstream.JetStream
	replicas int
	log      *slog.Logger
	failover *failover
}

// Connect connects, trying again until ctx ends while nobody listens. Refused credentials fail at once (ErrToken, ErrTLS).
func Connect(ctx context.Context, o Options) (*Bus, error) {
	log := orDiscard(o.Log)
	options, err := o.options(log)
	if err != nil {
		return nil, err
	}
	delay := 20 * time.Millisecond
	for {
		nc, err := nats.Connect(o.URL, options...)
		if err == nil {
			js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(maxAsync), jetstream.WithPublishAsyncTimeout(ackWait),
				jetstream.WithDefaultTimeout(10*time.Second))
			if err != nil {
				nc.Close()
				return nil, fmt.Errorf("connect to the bus at %s: %w", o.URL, err)
			}
			return &Bus{nc: nc, js: js, replicas: o.Replicas, log: log, failover: newFailover(nc, log)}, nil
		}
		if refused := refusal(err); refused != nil {
			return nil, fmt.Errorf("connect to the bus at %s: %w", o.URL, refused)
		}
		timer := time.NewTimer(delay)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, fmt.Errorf("connect to the bus at %s: %w", o.URL, ErrUnavailable.Wrap(err))
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

// Codes of the server that the client does not name.
const (
	codeAccountFull      = 10002 // resource limits exceeded for account
	codeFull             = 10023 // the server's limit is reached
	codeStreams          = 10027 // the account may have no more streams
	codeMemory           = 10028
	codeStorage          = 10047 // less is left than a stream reserves
	codeStore            = 10077 // a message was not stored; the text says why
	codeMaxBytesRequired = 10113
	codeStreamTooLarge   = 10122 // the account lets no stream be so large

	codeNoPeers    = 10005 // insufficient resources: fewer nodes than replicas
	codeNoReplicas = 10074 // replicas > 1 not supported in non-clustered mode
	codeInProcess  = 10158 // a message of this id is being replicated: a later try tells whether it was stored
)

// mapError turns the client's errors into this package's; context errors stay.
func mapError(err error) error {
	var api *jetstream.APIError
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
		errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, jetstream.ErrAsyncPublishTimeout),
		errors.Is(err, jetstream.ErrConsumerLeadershipChanged):
		return ErrUnavailable.Wrap(err)
	case errors.As(err, &api) && (api.ErrorCode == codeNoPeers || api.ErrorCode == codeNoReplicas):
		return ErrReplicas.Wrap(err)
	case errors.As(err, &api) && full(api):
		return ErrFull.Wrap(err)
	case errors.As(err, &api) && (api.ErrorCode == codeMaxBytesRequired || api.ErrorCode == codeStreamTooLarge):
		return ErrLimits.Wrap(err)
	case errors.As(err, &api) && (api.Code == http.StatusServiceUnavailable || api.ErrorCode == codeInProcess): // between two leaders
		return ErrUnavailable.Wrap(err)
	}
	return err
}

// full reports whether a server refuses because a limit is used up. Some such refusals have the code of a server that can't answer.
func full(e *jetstream.APIError) bool {
	switch e.ErrorCode {
	case codeAccountFull, codeFull, codeStreams, codeMemory, codeStorage:
		return true
	case codeStore:
		return strings.HasPrefix(e.Description, "maximum ") // .. bytes exceeded, .. messages exceeded
	}
	return false
}
