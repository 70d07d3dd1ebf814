package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"
)

const scope = "github.com/rollout-rl/rollout/libs/bus"

// propagator is W3C trace context, whatever the process has set globally: both languages read these headers.
var propagator propagation.TextMapPropagator = propagation.TraceContext{}

// Message is what is published.
type Message struct {
	Subject string
	Body    proto.Message
	ID      string // Nats-Msg-Id: a second message of the same id within two minutes is dropped by the server; "" for none
}

// PublishProto publishes one message and returns when the stream has stored it.
func (b *Bus) PublishProto(ctx context.Context, subject string, body proto.Message) error {
	return b.Publish(ctx, Message{Subject: subject, Body: body})
}

// Publish publishes messages and returns when the streams have stored all of them. They are sent without waiting in between. Those
// with an ID are sent again until ctx ends while the servers do not answer, as when one dies in the middle: the stream keeps them
// once. After an error some messages may be stored and some not.
func (b *Bus) Publish(ctx context.Context, messages ...Message) error {
	ctx, span := otel.Tracer(scope).Start(ctx, "bus publish", trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithAttributes(attribute.Int("messaging.batch.message_count", len(messages))))
	defer span.End()
	delay := firstRetry
	var unheard time.Time // since when the streams have been there and nobody has answered for them
	for {
		left, err := b.publish(ctx, messages)
		if err == nil {
			return nil
		}
		nobody := errors.Is(err, ErrNoStream)
		if len(left) == 0 || nobody && !b.exists(ctx, left) {
			span.RecordError(err)
			return err
		}
		unheard = b.failover.check(nobody, unheard)
		b.log.Debug("publishing again what has no ack", "messages", len(left), "error", err)
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
			messages, delay = left, min(2*delay, lastRetry)
		case <-ctx.Done():
			timer.Stop()
			return errors.Join(ErrUnavailable.Wrap(err), context.Cause(ctx)) // the stream is there, and had no leader
		}
	}
}

const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = time.Second
)

// publish sends once. After an error it gives the messages that have no ack and may be sent again; none: it is of no use.
func (b *Bus) publish(ctx context.Context, messages []Message) (again []Message, err error) {
	futures := make([]jetstream.PubAckFuture, len(messages))
	var errs []error
	hopeless := false
	failed := func(m Message, err error) {
		again = append(again, m)
		err = mapError(err)
		hopeless = hopeless || m.ID == "" || !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrNoStream)
		errs = append(errs, fmt.Errorf("publish to %s: %w", m.Subject, err))
	}
	for i, m := range messages {
		msg, options, err := encode(ctx, m)
		if err != nil {
			return nil, err
		}
		if futures[i], err = b.js.PublishMsgAsync(msg, options...); err != nil {
			failed(m, err)
		}
	}
	for i, f := range futures {
		if f == nil {
			continue
		}
		select {
		case <-f.Ok():
		case err := <-f.Err():
			failed(messages[i], err)
		case <-ctx.Done():
			return nil, errors.Join(append(errs, fmt.Errorf("publish to %s: wait for ack: %w", messages[i].Subject, context.Cause(ctx)))...)
		}
	}
	if hopeless {
		again = nil
	}
	return again, errors.Join(errs...)
}

// exists reports whether the streams of messages may be there although nobody answered for them: between two leaders of a stream
// nobody does. A question that is lost on the way, as while the servers elect their own leader, must not hold up the publisher until
// its context ends: without an answer in time they may be there.
func (b *Bus) exists(ctx context.Context, messages []Message) bool {
	ctx, cancel := context.WithTimeout(ctx, ackWait)
	defer cancel()
	seen := map[string]bool{}
	for _, m := range messages {
		if seen[m.Subject] {
			continue
		}
		seen[m.Subject] = true
		if _, err := b.js.StreamNameBySubject(ctx, m.Subject); errors.Is(mapError(err), ErrNoStream) {
			return false
		}
	}
	return true
}

func encode(ctx context.Context, m Message) (*nats.Msg, []jetstream.PublishOpt, error) {
	data, err := proto.Marshal(m.Body)
	if err != nil {
		return nil, nil, fmt.Errorf("publish to %s: marshal: %w", m.Subject, err)
	}
	if len(data) > MaxPayload {
		return nil, nil, fmt.Errorf("publish %d bytes to %s: %w", len(data), m.Subject, ErrTooLarge)
	}
	msg := &nats.Msg{Subject: m.Subject, Data: data, Header: nats.Header{}}
	propagator.Inject(ctx, HeaderCarrier(msg.Header))
	if m.ID == "" {
		return msg, nil, nil
	}
	return msg, []jetstream.PublishOpt{jetstream.WithMsgID(m.ID)}, nil
}

// HeaderCarrier lets OpenTelemetry read and write NATS headers, whose keys keep their case.
type HeaderCarrier nats.Header

// Get implements propagation.TextMapCarrier.
func (h HeaderCarrier) Get(key string) string { return nats.Header(h).Get(key) }

// Set implements propagation.TextMapCarrier.
func (h HeaderCarrier) Set(key, value string) { nats.Header(h).Set(key, value) }

// Keys implements propagation.TextMapCarrier.
func (h HeaderCarrier) Keys() []string {
	keys := make([]string, 0, len(h))
	for k := range h {
		keys = append(keys, k)
	}
	return keys
}
