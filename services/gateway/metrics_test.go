package gateway_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"google.golang.org/protobuf/proto"

	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

func TestMetrics(t *testing.T) {
	t.Parallel()
	reader := metric.NewManualReader()
	store := &ledger{sessions: map[string]*gateway.Session{}, expired: make(chan time.Time, 1), meters: metric.NewMeterProvider(metric.WithReader(reader))}
	s, _, _ := runOn(t, gateway.Config{}, store, &fakeWorker{model: "tiny"})
	complete := func(req *gatewayv1.CompleteRequest) error { return s.Complete(req, &collected{ctx: t.Context()}) }
	if err := complete(&gatewayv1.CompleteRequest{Model: "tiny", Stream: true, Prompts: textPrompts("a")}); err != nil {
		t.Fatal(err)
	}
	if err := complete(&gatewayv1.CompleteRequest{Prompts: []*inferencev1.Prompt{chat()}, Params: &inferencev1.SamplingParams{MaxTokens: proto.Uint32(100)}}); err == nil {
		t.Fatal("a completion longer than the context")
	}
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	label := func(set attribute.Set, keys ...attribute.Key) (text string) {
		for _, key := range keys {
			value, _ := set.Value(key)
			text += " " + value.String()
		}
		return text
	}
	labels := []attribute.Key{"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model", "gen_ai.token.type", "error.type"}
	var got []string
	for _, m := range all.ScopeMetrics[0].Metrics {
		switch data := m.Data.(type) {
		case metricdata.Histogram[float64]:
			for _, p := range data.DataPoints {
				got = append(got, fmt.Sprintf("%s %d%s", m.Name, p.Count, label(p.Attributes, labels...)))
			}
		case metricdata.Histogram[int64]:
			for _, p := range data.DataPoints {
				got = append(got, fmt.Sprintf("%s %d%s", m.Name, p.Sum, label(p.Attributes, labels...)))
			}
		case metricdata.Gauge[int64]:
			for _, p := range data.DataPoints {
				got = append(got, fmt.Sprintf("%s %d%s", m.Name, p.Value, label(p.Attributes, "rollout.run")))
			}
		}
	}
	slices.Sort(got)
	want := []string{
		"gen_ai.client.token.usage 0 chat rollout  tiny output ",
		"gen_ai.client.token.usage 2 text_completion rollout tiny tiny input ",
		"gen_ai.client.token.usage 3 text_completion rollout tiny tiny output ",
		"gen_ai.server.request.duration 1 chat rollout  tiny  CONTEXT_OVERFLOW",
		"gen_ai.server.request.duration 1 text_completion rollout tiny tiny  ",
		"gen_ai.server.time_per_output_token 1 text_completion rollout tiny tiny  ",
		"gen_ai.server.time_to_first_token 1 text_completion rollout tiny tiny  ",
		"rollout.gateway.queue.requests 0 ",
		"rollout.gateway.worker.completions 0 run-tiny",
		"rollout.gateway.worker.tokens 0 run-tiny",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}
