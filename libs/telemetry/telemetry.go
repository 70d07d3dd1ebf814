// Package telemetry sets up logs, traces and metrics of a process, and turns log records of a run
// into events.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"
	oteltrace "go.opentelemetry.io/otel/trace"
)

// NewHandler is the slog handler of a process: format "text" or "json", level "debug", "info",
// "warn" or "error". Records that are logged inside a span carry its trace and span id.
func NewHandler(w io.Writer, format, level string) (slog.Handler, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level: %w", err)
	}
	o := &slog.HandlerOptions{Level: l}
	switch format {
	case "json":
		return traced{slog.NewJSONHandler(w, o)}, nil
	case "text":
		return traced{slog.NewTextHandler(w, o)}, nil
	}
	return nil, fmt.Errorf("log format %q is neither text nor json", format)
}

// traced adds trace ids.
type traced struct{ slog.Handler }

func (t traced) Handle(ctx context.Context, r slog.Record) error {
	if sc := oteltrace.SpanContextFromContext(ctx); sc.IsValid() {
		r = r.Clone()
		r.AddAttrs(slog.String("trace_id", sc.TraceID().String()), slog.String("span_id", sc.SpanID().String()))
	}
	return t.Handler.Handle(ctx, r)
}

func (t traced) WithAttrs(attrs []slog.Attr) slog.Handler { return traced{t.Handler.WithAttrs(attrs)} }
func (t traced) WithGroup(name string) slog.Handler       { return traced{t.Handler.WithGroup(name)} }

// Setup sets the global tracer and meter providers. They export over OTLP/gRPC exactly when environ
// has OTEL_EXPORTER_OTLP_ENDPOINT (or the endpoint of one signal) and not OTEL_SDK_DISABLED=true;
// otherwise they cost next to nothing. Trace context crosses processes either way. The other OTEL_*
// variables are read by the exporters. shutdown flushes; give it a deadline.
func Setup(ctx context.Context, service, version string, environ []string) (shutdown func(context.Context) error, err error) {
	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}))
	env := lookup(environ)
	nothing := func(context.Context) error { return nil }
	if strings.EqualFold(env("OTEL_SDK_DISABLED"), "true") {
		return nothing, nil
	}
	all := env("OTEL_EXPORTER_OTLP_ENDPOINT")
	res, err := resource.Merge(resource.Default(), resource.NewSchemaless(
		attribute.String("service.name", service), attribute.String("service.version", version)))
	if err != nil {
		return nil, fmt.Errorf("set up telemetry: %w", err)
	}
	var ends []func(context.Context) error
	if (all != "" || env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != "") && env("OTEL_TRACES_EXPORTER") != "none" {
		exporter, err := otlptracegrpc.New(ctx)
		if err != nil {
			return nil, fmt.Errorf("set up traces: %w", err)
		}
		p := trace.NewTracerProvider(trace.WithBatcher(exporter), trace.WithResource(res))
		otel.SetTracerProvider(p)
		ends = append(ends, p.Shutdown)
	}
	if (all != "" || env("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") != "") && env("OTEL_METRICS_EXPORTER") != "none" {
		exporter, err := otlpmetricgrpc.New(ctx)
		if err != nil {
			return nil, fmt.Errorf("set up metrics: %w", err)
		}
		p := metric.NewMeterProvider(metric.WithReader(metric.NewPeriodicReader(exporter)), metric.WithResource(res))
		otel.SetMeterProvider(p)
		ends = append(ends, p.Shutdown)
	}
	return func(ctx context.Context) error {
		var errs []error
		for _, end := range ends {
			errs = append(errs, end(ctx))
		}
		return errors.Join(errs...)
	}, nil
}

func lookup(environ []string) func(string) string {
	env := map[string]string{}
	for _, e := range environ {
		name, value, _ := strings.Cut(e, "=")
		env[name] = value
	}
	return func(name string) string { return env[name] }
}
