// Package bus connects processes through streams of NATS JetStream, embedded in this process
// (StartEmbedded) or elsewhere (Connect).
//
// A message body is one protobuf message; the trace context travels in the headers. streams.go
// configures the streams and consumers and gives the reason for each setting.
package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
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
	ErrNoStream    = rpcerr.New(codes.NotFound, "BUS_STREAM_NOT_FOUND", "the stream or consumer does not exist; EnsureRun creates those of a run")
	ErrToken       = rpcerr.New(codes.Unauthenticated, "BUS_UNAUTHENTICATED", "the NATS server refused the credentials").
			Fix("check nats.token, nats.user with its password, or nats.nkey against the server's users")
	ErrTLS = rpcerr.New(codes.FailedPrecondition, "BUS_TLS",
		"TLS with the NATS server failed: only one side uses it, or a certificate is not signed by the expected authority")
	ErrReplicas = rpcerr.New(codes.FailedPrecondition, "BUS_REPLICAS",
		"the NATS servers can't keep that many replicas; add nodes or lower nats.replicas")
	ErrFull = rpcerr.New(codes.ResourceExhausted, "BUS_FULL",
		"the NATS servers are full: max_file, the storage of the account, or its number of streams is exhausted").RetryAfter(time.Second).
		Fix("raise max_file of the servers' jetstream block, or the limits of the account; run `rollout doctor` to find out which")
	ErrLimits = rpcerr.New(codes.FailedPrecondition, "BUS_LIMITS", "the limits of the NATS account do not allow the streams that rollout creates").
			Fix("give the account no max_stream_bytes below 1 GiB and no max_bytes_required; run `rollout doctor` to find out which")
	ErrTooLarge = rpcerr.New(codes.InvalidArgument, "BUS_MESSAGE_TOO_LARGE", "the message is larger than the limit of the bus")
	ErrBody     = rpcerr.New(codes.InvalidArgument, "BUS_BAD_BODY", "the message body does not have the expected type")
)

// maxAsync is how many publishes may wait for their acks; more block the publisher.
const maxAsync = 1024

// ackWait is how long a stream may take to acknowledge a message, in case its server dies before it
// does.
const ackWait = 5 * time.Second

// Bus is a connection. Its methods may be called from many goroutines. It reconnects forever, in a
// cluster to any node; until then calls wait until their context ends.
type Bus struct {
	nc       *nats.Conn
	js       jetstream.JetStream
	replicas int
	log      *slog.Logger
	failover *failover
}

// Connect connects to a server and retries until ctx ends if none listens. Refused credentials fail
// at once (ErrToken, ErrTLS).
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
		_ = b.nc.FlushTimeout(time.Second) // acknowledged messages are stored already
	}
	b.nc.Close()
}

// Conn returns the underlying NATS connection.
func (b *Bus) Conn() *nats.Conn { return b.nc }

// JetStream returns the underlying client, for functions that this package does not wrap.
func (b *Bus) JetStream() jetstream.JetStream { return b.js }

// Servers are the addresses that it connects to: those of the URL, and those that a cluster has
// reported.
func (b *Bus) Servers() (addresses []string) {
	for _, server := range b.nc.Servers() {
		if at, err := url.Parse(server); err == nil {
			addresses = append(addresses, at.Host)
		}
	}
	return addresses
}

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
	codeStreamTooLarge   = 10122 // the account does not allow such a large stream

	codeNoPeers    = 10005 // insufficient resources: fewer nodes than replicas
	codeNoReplicas = 10074 // replicas > 1 not supported in non-clustered mode
	codeInProcess  = 10158 // a message with this id is being replicated; a retry finds out whether it was stored
)

// noSpace is in the description of an error of a server whose disk is full. The codes of such
// errors name the request instead.
const noSpace = "no space left on device"

// mapError converts the client's errors to this package's errors. Context errors are unchanged.
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
	case errors.As(err, &api) && strings.Contains(api.Description, noSpace):
		return rpcerr.ErrDiskFull.WithMessage("the disk of the NATS server is full").Wrap(err)
	case errors.As(err, &api) && (api.ErrorCode == codeNoPeers || api.ErrorCode == codeNoReplicas):
		return ErrReplicas.Wrap(err)
	case errors.As(err, &api) && full(api):
		return ErrFull.Wrap(err)
	case errors.As(err, &api) && (api.ErrorCode == codeMaxBytesRequired || api.ErrorCode == codeStreamTooLarge):
		return ErrLimits.Wrap(err)
	case errors.As(err, &api) && (api.Code == http.StatusServiceUnavailable || api.ErrorCode == codeInProcess): // a leader is being elected
		return ErrUnavailable.Wrap(err)
	}
	return err
}

// full reports whether the server refused because a limit is reached. Some of these errors have the
// code of an unavailable server.
func full(e *jetstream.APIError) bool {
	switch e.ErrorCode {
	case codeAccountFull, codeFull, codeStreams, codeMemory, codeStorage:
		return true
	case codeStore:
		return strings.HasPrefix(e.Description, "maximum ") // .. bytes exceeded, .. messages exceeded
	}
	return false
}
