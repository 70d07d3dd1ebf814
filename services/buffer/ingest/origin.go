package ingest

import (
	"context"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/rollout-rl/rollout/libs/bus"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

var tracer = otel.Tracer("github.com/rollout-rl/rollout/services/buffer/ingest")

// begin starts the span of an ingest: it continues the trace of the worker that published the first
// delivery, and has links to those of the others.
func begin(ctx context.Context, deliveries []*bus.Delivery) (context.Context, trace.Span) {
	options := []trace.SpanStartOption{
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(attribute.Int("messaging.batch.message_count", len(deliveries))),
	}
	parent := ctx
	for n, d := range deliveries {
		published := d.Context(ctx)
		if n == 0 {
			parent = published
			continue
		}
		if link := trace.LinkFromContext(published); link.SpanContext.IsValid() {
			options = append(options, trace.WithLinks(link))
		}
	}
	return tracer.Start(parent, "ingest", options...)
}

// mostOrigins is the number of groups of a run whose spans are remembered.
const mostOrigins = 1 << 14

// group identifies a group of a run.
type group struct {
	epoch uint32
	index uint64
}

// Origins remembers the spans in which the groups of a run were ingested, the newest ones, so that
// the lease of their batch can link to them. Without traces it is empty. Safe for concurrent use.
type Origins struct {
	mu     sync.Mutex
	spans  map[group][]trace.SpanContext
	oldest []group // in the order in which they came
}

// NewOrigins makes an empty Origins.
func NewOrigins() *Origins { return &Origins{spans: map[group][]trace.SpanContext{}} }

func (o *Origins) add(span trace.SpanContext, envelopes []*trajectoryv1.TrajectoryEnvelope) {
	if !span.IsValid() || !span.IsSampled() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, e := range envelopes {
		g := group{e.GetHeader().GetKey().GetEpoch(), e.GetHeader().GetKey().GetIndex()}
		before := o.spans[g]
		if len(before) > 0 && before[len(before)-1].Equal(span) {
			continue
		}
		if before == nil {
			o.oldest = append(o.oldest, g)
		}
		o.spans[g] = append(before, span)
	}
	for len(o.oldest) > mostOrigins {
		delete(o.spans, o.oldest[0])
		o.oldest = o.oldest[1:]
	}
}

// Link adds links to the span of ctx: to each span in which samples with these keys were ingested.
func (o *Origins) Link(ctx context.Context, keys func(yield func(*trajectoryv1.TrajectoryKey) bool)) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	linked := map[trace.SpanID]bool{}
	for key := range keys {
		for _, origin := range o.spans[group{key.GetEpoch(), key.GetIndex()}] {
			if !linked[origin.SpanID()] {
				linked[origin.SpanID()] = true
				span.AddLink(trace.Link{SpanContext: origin})
			}
		}
	}
}
