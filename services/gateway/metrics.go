package gateway

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/semconv/v1.41.0/genaiconv"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
)

const (
	meterName = "github.com/rollout-rl/rollout/services/gateway"
	provider  = genaiconv.ProviderNameAttr("rollout")
)

// Buckets that OpenTelemetry's conventions for generative AI give.
var (
	durationBuckets = metric.WithExplicitBucketBoundaries(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
	firstBuckets    = metric.WithExplicitBucketBoundaries(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
	perTokenBuckets = metric.WithExplicitBucketBoundaries(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
	tokenBuckets    = metric.WithExplicitBucketBoundaries(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
)

// metrics are those of OpenTelemetry's conventions for generative AI, and gauges of the queue and
// the workers.
type metrics struct {
	duration genaiconv.ServerRequestDuration
	first    genaiconv.ServerTimeToFirstToken
	perToken genaiconv.ServerTimePerOutputToken
	usage    genaiconv.ClientTokenUsage
	gauges   metric.Registration
}

func newMetrics(meters metric.MeterProvider, d *directory) (*metrics, error) {
	meter := meters.Meter(meterName)
	m := &metrics{}
	errs := make([]error, 8)
	m.duration, errs[0] = genaiconv.NewServerRequestDuration(meter, durationBuckets)
	m.first, errs[1] = genaiconv.NewServerTimeToFirstToken(meter, firstBuckets)
	m.perToken, errs[2] = genaiconv.NewServerTimePerOutputToken(meter, perTokenBuckets)
	m.usage, errs[3] = genaiconv.NewClientTokenUsage(meter, tokenBuckets)
	var waiting, tokens, completions metric.Int64ObservableGauge
	waiting, errs[4] = meter.Int64ObservableGauge("rollout.gateway.queue.requests", metric.WithUnit("{request}"), metric.WithDescription("Requests that wait for an inference worker."))
	tokens, errs[5] = meter.Int64ObservableGauge("rollout.gateway.worker.tokens", metric.WithUnit("{token}"), metric.WithDescription("Estimated tokens of the requests in flight at an inference worker."))
	completions, errs[6] = meter.Int64ObservableGauge("rollout.gateway.worker.completions", metric.WithUnit("{completion}"), metric.WithDescription("Completions in flight at an inference worker."))
	m.gauges, errs[7] = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		d.mu.Lock()
		defer d.mu.Unlock()
		o.ObserveInt64(waiting, int64(len(d.queue.tickets)))
		for _, w := range d.workers {
			of := metric.WithAttributes(attribute.String("rollout.run", w.run), attribute.String("rollout.worker", w.id))
			o.ObserveInt64(tokens, int64(w.tokens), of)
			o.ObserveInt64(completions, int64(w.completions), of)
		}
		return nil
	}, waiting, tokens, completions)
	return m, errors.Join(errs...)
}

// observation is the times of one request.
type observation struct {
	metrics   *metrics
	operation genaiconv.OperationNameAttr
	attrs     []attribute.KeyValue
	start     time.Time
	first     time.Time // zero before the first piece
}

func (m *metrics) begin(req *gatewayv1.CompleteRequest, model string) *observation {
	o := &observation{metrics: m, operation: genaiconv.OperationNameTextCompletion, start: time.Now()}
	if prompts := req.GetPrompts(); len(prompts) > 0 && prompts[0].GetChat() != nil {
		o.operation = genaiconv.OperationNameChat
	}
	if req.GetModel() != "" {
		o.attrs = append(o.attrs, attribute.String("gen_ai.request.model", req.GetModel()))
	}
	o.attrs = append(o.attrs, attribute.String("gen_ai.response.model", model))
	return o
}

// piece records that a piece has arrived.
func (o *observation) piece() {
	if o.first.IsZero() {
		o.first = time.Now()
	}
}

// end records a request and its error, nil if it succeeded.
func (o *observation) end(ctx context.Context, rec *recorder, err error) {
	ctx, now, m := context.WithoutCancel(ctx), time.Now(), o.metrics
	attrs := o.attrs
	if err != nil {
		reason := rpcerr.Reason(err)
		if reason == "" {
			reason = rpcerr.Code(err).String()
		}
		attrs = append(attrs[:len(attrs):len(attrs)], attribute.String("error.type", reason))
	}
	m.duration.Record(ctx, now.Sub(o.start).Seconds(), o.operation, provider, attrs...)
	m.usage.Record(ctx, int64(rec.tokens), o.operation, provider, genaiconv.TokenTypeOutput, o.attrs...)
	if err != nil {
		return
	}
	m.usage.Record(ctx, int64(rec.promptTokens()), o.operation, provider, genaiconv.TokenTypeInput, o.attrs...)
	if rec.call.GetStream() && !o.first.IsZero() {
		m.first.Record(ctx, o.first.Sub(o.start).Seconds(), o.operation, provider, o.attrs...)
		if later := rec.longest() - 1; later > 0 {
			m.perToken.Record(ctx, now.Sub(o.first).Seconds()/float64(later), o.operation, provider, o.attrs...)
		}
	}
}
