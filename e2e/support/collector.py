"""A collector of traces and metrics over OTLP, which finds the path of a group in the spans."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

LEASE = "rollout.buffer.v1.BufferService/LeaseBatch"
SAMPLED = [
    ("rolloutd", "bus publish"),
    ("inference-worker", "sample"),
    ("inference-worker", "environment reset"),
    ("inference-worker", "generate"),
    ("inference-worker", "environment step"),
    ("inference-worker", "reward"),
    ("inference-worker", "publish"),
    ("rolloutd", "ingest"),
]
"""The spans of a group before its batch is leased: the lease has links to those of its groups."""
STEPPED = [
    ("rolloutd", "step"),
    ("rolloutd", LEASE),
    ("learner-worker", "rollout.learner.v1.LearnerWorkerService/Train"),
    ("rolloutd", "rollout.buffer.v1.BufferService/CommitStep"),
    ("inference-worker", "rollout.inference.v1.InferenceWorkerService/LoadWeights"),
]
"""The spans in the trace of a step."""
KEY = ("x-key", "s3cret")


class Collector(TraceServiceServicer, MetricsServiceServicer):
    """Accepts exports with the right key, like a hosted collector."""

    def __init__(self) -> None:
        self.traces: dict[bytes, set[tuple[str, str]]] = {}
        self.spans: dict[bytes, tuple[str, Any]] = {}  # service and span by id
        self.meters: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:
        if KEY not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")
        if isinstance(request, metrics.ExportMetricsServiceRequest):
            self.meters |= {m.name for r in request.resource_metrics for s in r.scope_metrics for m in s.metrics}
            return metrics.ExportMetricsServiceResponse()
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.traces.setdefault(span.trace_id, set()).add((service, span.name))
                self.spans[span.span_id] = service, span
        return traces.ExportTraceServiceResponse()

    def has(self, *more: tuple[str, str], meters: Iterable[str] = (), seconds: float = 30) -> None:
        """Wait for the path of a group, with more spans before its batch is leased, and for
        meters."""
        deadline = time.monotonic() + seconds
        while lacks := [*self._lacks((*SAMPLED, *more)), *(set(meters) - self.meters)]:
            assert time.monotonic() < deadline, (lacks, {(service, span.name) for service, span in self.spans.values()})
            time.sleep(0.1)

    def _lacks(self, wanted: Sequence[tuple[str, str]]) -> list[str]:
        """What the best lease lacks of the path of a group, from its issue to the delivery of the
        weights that were trained on it; empty: nothing."""
        spans = dict(self.spans)  # the exports of other threads add to it
        children: dict[bytes, list[bytes]] = {}
        for span_id, (service, span) in spans.items():
            if service == "inference-worker":
                children.setdefault(span.parent_span_id, []).append(span_id)
        lacks = [f"{name} of {service}" for service, name in (*wanted, *STEPPED)]
        for _, lease in spans.values():
            if lease.name != LEASE or not lease.links:
                continue
            before = _before(lease, spans)
            before |= _closure(before, lambda i: children.get(i, ()))
            sampled = {(spans[i][0], spans[i][1].name) for i in before if i in spans}
            missing = [f"{name} of {service}" for service, name in wanted if (service, name) not in sampled]
            step = set(self.traces[lease.trace_id])
            missing += [f"{name} of {service}" for service, name in STEPPED if (service, name) not in step]
            lacks = min(lacks, missing, key=len)
        return lacks


def _before(lease: Any, spans: dict[bytes, tuple[str, Any]]) -> set[bytes]:
    """The spans from which a lease follows, over links and parents."""

    def origins(span_id: bytes) -> list[bytes]:
        if span_id not in spans:
            return []
        span = spans[span_id][1]
        return [span.parent_span_id, *(link.span_id for link in span.links)]

    return _closure({link.span_id for link in lease.links}, origins)


def _closure(start: set[bytes], following: Callable[[bytes], Iterable[bytes]]) -> set[bytes]:
    reached, ahead = set(start), list(start)
    while ahead:
        more = [i for i in following(ahead.pop()) if i not in reached]
        reached.update(more)
        ahead += more
    return reached


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, dict[str, str]]]:
    """A collector, and the environment variables of a control plane that exports to it."""
    server, collected = grpc.server(futures.ThreadPoolExecutor(4)), Collector()
    add_TraceServiceServicer_to_server(collected, server)
    add_MetricsServiceServicer_to_server(collected, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield (
        collected,
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_HEADERS": "=".join(KEY),
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        },
    )
    server.stop(None)
