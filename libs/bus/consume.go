package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/proto/gen/names"
)

// Consumer is a durable consumer of a stream, shared by all clients that pull from it.
type Consumer struct {
	bus  *Bus
	c    jetstream.Consumer
	name string
}

// Work is the shared consumer of a run's prompt groups. ErrNoStream before EnsureRun.
func (b *Bus) Work(ctx context.Context, run string) (*Consumer, error) {
	return b.consumer(ctx, names.WorkStream(run), names.WorkersConsumer)
}

// Trajectories is the buffer's consumer of a run's trajectories. ErrNoStream before EnsureRun.
func (b *Bus) Trajectories(ctx context.Context, run string) (*Consumer, error) {
	return b.consumer(ctx, names.TrajStream(run), names.BufferConsumer)
}

// Events is the storage service's consumer of all events. ErrNoStream before EnsureEvents.
func (b *Bus) Events(ctx context.Context) (*Consumer, error) {
	return b.consumer(ctx, names.EventStream, names.StorageConsumer)
}

func (b *Bus) consumer(ctx context.Context, stream, name string) (*Consumer, error) {
	full := stream + "/" + name
	c, err := ask(ctx, func(ctx context.Context) (jetstream.Consumer, error) { return b.js.Consumer(ctx, stream, name) })
	if err != nil {
		b.failover.record(full, false, err)
		return nil, fmt.Errorf("consumer %s of %s: %w", name, stream, mapError(err))
	}
	return &Consumer{bus: b, c: c, name: full}, nil
}

// heartbeat is how often the server confirms a fetch that waits. A fetch whose server was restarted
// fails after two of them, instead of ten seconds.
const heartbeat = 2 * time.Second

// Fetch returns up to limit available deliveries. If there are none it waits for up to wait, then
// returns nil, nil. It never waits for a batch to fill. It returns ErrNoStream if the stream was
// deleted and ErrUnavailable while the server is away. After 10 s without a responder the
// connection moves to another server of the cluster.
func (c *Consumer) Fetch(ctx context.Context, limit int, wait time.Duration) ([]*Delivery, error) {
	got, err := c.collect(c.c.FetchNoWait(limit))
	if err != nil || len(got) > 0 {
		return got, err
	}
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	options := []jetstream.FetchOpt{jetstream.FetchContext(waiting)}
	if end, _ := waiting.Deadline(); time.Until(end) > 3*heartbeat {
		options = append(options, jetstream.FetchHeartbeat(heartbeat))
	}
	if got, err = c.collect(c.c.Fetch(1, options...)); err != nil || len(got) == 0 || limit == 1 {
		if err == nil && len(got) == 0 {
			err = ctx.Err()
		}
		return got, err
	}
	rest, err := c.collect(c.c.FetchNoWait(limit - 1))
	if err != nil { // return the first delivery; the next call fails the same way
		return got, nil
	}
	return append(got, rest...), nil
}

func (c *Consumer) collect(batch jetstream.MessageBatch, err error) ([]*Delivery, error) {
	var out []*Delivery
	if err == nil {
		for m := range batch.Messages() {
			out = append(out, &Delivery{msg: m})
		}
		err = batch.Error()
	}
	c.bus.failover.record(c.name, len(out) > 0 || errors.Is(err, jetstream.ErrNoMessages), err)
	switch {
	case err == nil, len(out) > 0, errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout),
		errors.Is(err, jetstream.ErrNoMessages), errors.Is(err, context.Canceled):
		return out, nil
	}
	return nil, fmt.Errorf("fetch from %s: %w", c.name, mapError(err))
}

// Depth counts the messages of a consumer.
type Depth struct {
	Waiting   uint64 // not delivered yet
	Delivered uint64 // delivered and not acked
}

// Depth requests the counts from the server.
func (c *Consumer) Depth(ctx context.Context) (Depth, error) {
	info, err := ask(ctx, c.c.Info)
	if err != nil {
		return Depth{}, fmt.Errorf("depth of %s: %w", c.name, mapError(err))
	}
	return Depth{Waiting: info.NumPending, Delivered: uint64(max(0, info.NumAckPending))}, nil
}

// Delivery is a message that belongs to this consumer until its ack wait ends. Then it is
// redelivered, unless it was acked or Progress was called. Exactly one of Ack, Nak and Term ends
// it.
type Delivery struct{ msg jetstream.Msg }

// Decode reads the body. On ErrBody call Term, because a redelivery fails the same way.
func (d *Delivery) Decode(into proto.Message) error {
	if err := proto.Unmarshal(d.msg.Data(), into); err != nil {
		return fmt.Errorf("message on %s: %w", d.msg.Subject(), ErrBody.Wrap(err))
	}
	return nil
}

// Data is the raw body.
func (d *Delivery) Data() []byte { return d.msg.Data() }

// Subject returns the subject to which the message was published.
func (d *Delivery) Subject() string { return d.msg.Subject() }

// Header is a header's first value.
func (d *Delivery) Header(key string) string { return d.msg.Headers().Get(key) }

// Context returns ctx with the publisher's trace.
func (d *Delivery) Context(ctx context.Context) context.Context {
	return propagator.Extract(ctx, HeaderCarrier(d.msg.Headers()))
}

// Attempt counts the deliveries of this message, from 1.
func (d *Delivery) Attempt() uint64 {
	if m, err := d.msg.Metadata(); err == nil {
		return m.NumDelivered
	}
	return 1
}

// Sequence is its place in the stream, from 1.
func (d *Delivery) Sequence() uint64 {
	if m, err := d.msg.Metadata(); err == nil {
		return m.Sequence.Stream
	}
	return 0
}

// Ack ends the delivery. The ack is sent but not confirmed; if it is lost the message is
// redelivered.
func (d *Delivery) Ack() error { return mapError(d.msg.Ack()) }

// AckConfirmed ends the delivery and waits for the server's confirmation.
func (d *Delivery) AckConfirmed(ctx context.Context) error { return mapError(d.msg.DoubleAck(ctx)) }

// Nak returns the message to the stream, which redelivers it to any consumer after delay.
func (d *Delivery) Nak(delay time.Duration) error {
	if delay <= 0 {
		return mapError(d.msg.Nak())
	}
	return mapError(d.msg.NakWithDelay(delay))
}

// Progress restarts the ack wait.
func (d *Delivery) Progress() error { return mapError(d.msg.InProgress()) }

// Term drops the message as one that cannot be processed; the server's advisories contain the
// reason.
func (d *Delivery) Term(reason string) error { return mapError(d.msg.TermWithReason(reason)) }
