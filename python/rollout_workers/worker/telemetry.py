"""Exports traces and metrics, and passes trace contexts on. Without an OTLP endpoint nothing is
recorded, but the contexts of callers are still passed on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rollout_workers.worker.spec import Identity

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("rollout_workers")


def configure(endpoint: str, who: Identity) -> None:
    """Export traces and metrics to ``endpoint`` (OTLP over gRPC, ``http://host:port``). Empty:
    record nothing.

    Call once, before the first span. The exporter runs in separate threads and drops spans while
    the collector is unreachable.
    """
    if not endpoint:
        return
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    target = endpoint if "://" in endpoint else f"http://{endpoint}"
    insecure = not target.startswith("https://")
    resource = Resource.create(
        {
            "service.name": who.service,
            "service.namespace": "rollout",
            "service.instance.id": who.process,
            "rollout.run": who.run,
            "rollout.worker": who.worker,
        }
    )
    tracer_provider = TracerProvider(resource=resource)
    tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=target, insecure=insecure)))
    trace.set_tracer_provider(tracer_provider)
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=target, insecure=insecure))
    metrics.set_meter_provider(MeterProvider(resource=resource, metric_readers=[reader]))


def flush() -> None:
    """Send buffered spans before the process ends. Takes at most a second."""
    for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
        force = getattr(provider, "force_flush", None)
        if force is not None:
            force(1000)


def incoming(headers: Mapping[str, str] | None) -> Context:
    """The trace context in the ``traceparent`` of NATS headers or gRPC metadata."""
    return _propagator.extract(dict(headers or {}))


def outgoing(context: Context | None = None) -> dict[str, str]:
    """The ``traceparent`` header of the current span; empty outside of a trace."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, context)
    return headers


def distinct(contexts: Iterable[Context]) -> tuple[Context, ...]:
    """The contexts with different spans, without those outside of a trace."""
    by_span = {trace.get_current_span(context).get_span_context().span_id: context for context in contexts}
    return tuple(context for span_id, context in by_span.items() if span_id)


@contextmanager
def span(name: str, parents: Iterable[Context] = (), **attributes: str | int) -> Iterator[trace.Span]:
    """A span that is current inside ``with``. The first context is its parent, the others are
    links."""
    contexts = list(parents)
    links = [trace.Link(trace.get_current_span(context).get_span_context()) for context in contexts[1:]]
    started = _tracer.start_span(name, contexts[0] if contexts else None, links=links, attributes=attributes)
    with trace.use_span(started, end_on_exit=True) as current:
        yield current


class Meters:
    """The worker's metrics."""

    def __init__(self) -> None:
        meter = metrics.get_meter("rollout_workers")
        self.samples = meter.create_counter("rollout.samples", description="samples finished, by outcome and reason")
        self.tokens = meter.create_counter("rollout.tokens", description="completion tokens of finished samples")
        self.publish_seconds = meter.create_histogram(
            "rollout.publish.duration", unit="s", description="time until a stream has stored samples"
        )
        self.train_seconds = meter.create_histogram(
            "rollout.train.duration", unit="s", description="time of a step of the learner"
        )
