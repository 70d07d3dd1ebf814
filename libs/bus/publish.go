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

// propagator is W3C trace context, regardless of the global propagator, because both languages read
// these headers.
var propagator propagation.TextMapPropagator = propagation.TraceContext{}

// Message is a message to publish.
type Message struct {
	Subject string
	Body    proto.Message
	ID      string // Nats-Msg-Id: the server drops another message with this id within two minutes; "": none
}

// PublishProto publishes one message and returns when the stream has stored it.
func (b *Bus) PublishProto(ctx context.Context, subject string, body proto.Message) error {
	return b.Publish(ctx, Message{Subject: subject, Body: body})
}

// Publish publishes messages and returns when the streams have stored all of them. It sends all of
// them before it waits. Those with an ID are sent again until ctx ends if the servers do not
// answer, for example because one died: the stream keeps them once. After an error some messages
// may be stored and some not.
func (b *Bus) Publish(ctx context.Context, messages ...Message) error {
	ctx, span := otel.Tracer(scope).Start(ctx, "bus publish", trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithAttributes(attribute.Int("messaging.batch.message_count", len(messages))))
	defer span.End()
	delay := firstRetry
	var outage time.Time // since when the streams have existed without a responder
	for {
		left, err := b.publish(ctx, messages)
		if err == nil {
			return nil
		}
		noResponders := errors.Is(err, ErrNoStream)
		if len(left) == 0 || noResponders && !b.exists(ctx, left) {
			span.RecordError(err)
			return err
		}
		outage = b.failover.check(noResponders, outage)
		b.log.Debug("publishing messages without an ack again", "messages", len(left), "error", err)
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
			messages, delay = left, min(2*delay, lastRetry)
		case <-ctx.Done():
			timer.Stop()
			return errors.Join(ErrUnavailable.Wrap(err), context.Cause(ctx)) // the stream exists but has no leader
		}
	}
}

const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = time.Second
)

// publish sends once. After an error it returns the messages without an ack that may be sent again,
// or none if a retry cannot succeed.
func (b *Bus) publish(ctx context.Context, messages []Message) (again []Message, err error) {
	futures := make([]jetstream.PubAckFuture, len(messages))
	var errs []error
	fatal := false
	failed := func(m Message, err error) {
		again = append(again, m)
		err = mapError(err)
		fatal = fatal || m.ID == "" || !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrNoStream)
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
			err := fmt.Errorf("publish to %s: wait for ack: %w", messages[i].Subject, context.Cause(ctx))
			return nil, errors.Join(append(errs, ErrUnavailable.Wrap(err))...)
		}
	}
	if fatal {
		again = nil
	}
	return again, errors.Join(errs...)
}

// exists reports whether the streams of messages may exist although there was no responder, as
// during the election of a stream leader. A lost request, as during the election of the servers'
// own leader, must not block the publisher until its context ends: without an answer in time the
// streams may exist.
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

// HeaderCarrier implements propagation.TextMapCarrier for NATS headers, whose keys keep their case.
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
