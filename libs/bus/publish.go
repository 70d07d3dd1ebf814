package bus

import (
	"context"
	"errors"
	"fmt"

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

// Publish publishes messages and returns when the streams have stored all of them. They are sent without waiting in between;
// after an error some may be stored and some not, so a caller that tries again gives IDs or publishes to what dedups.
func (b *Bus) Publish(ctx context.Context, messages ...Message) error {
	ctx, span := otel.Tracer(scope).Start(ctx, "bus publish", trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithAttributes(attribute.Int("messaging.batch.message_count", len(messages))))
	defer span.End()
	futures := make([]jetstream.PubAckFuture, 0, len(messages))
	for _, m := range messages {
		msg, options, err := encode(ctx, m)
		if err != nil {
			return err
		}
		f, err := b.js.PublishMsgAsync(msg, options...)
		if err != nil {
			return fmt.Errorf("publish to %s: %w", m.Subject, mapError(err))
		}
		futures = append(futures, f)
	}
	var errs []error
	for i, f := range futures {
		select {
		case <-f.Ok():
		case err := <-f.Err():
			errs = append(errs, fmt.Errorf("publish to %s: %w", messages[i].Subject, mapError(err)))
		case <-ctx.Done():
			return errors.Join(append(errs, fmt.Errorf("publish to %s: wait for ack: %w", messages[i].Subject, context.Cause(ctx)))...)
		}
	}
	if err := errors.Join(errs...); err != nil {
		span.RecordError(err)
		return err
	}
	return nil
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
