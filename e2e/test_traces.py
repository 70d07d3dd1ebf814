"""One trace through all components: the services, NATS, and the Python workers export their spans
to a collector."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
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
from sim import Job, finish, sim_mesh, stop, submit

SAMPLED = [("rolloutd", "bus publish"), ("inference-worker", "sample")]
TRAINED = [
    ("rolloutd", "step"),
    ("rolloutd", "rollout.buffer.v1.BufferService/LeaseBatch"),
    ("rolloutd", "rollout.buffer.v1.BufferService/CommitStep"),
    ("learner-worker", "rollout.learner.v1.LearnerWorkerService/Train"),
]
METERS = {"rpc.server.call.duration", "rollout.samples", "rollout.train.duration"}
KEY = ("x-key", "s3cret")


class Collector(TraceServiceServicer, MetricsServiceServicer):
    """Accepts exports with the right key, like a hosted collector."""

    def __init__(self) -> None:
        self.traces: dict[bytes, set[tuple[str, str]]] = {}
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
        return traces.ExportTraceServiceResponse()

    def whole(self, hops: list[tuple[str, str]]) -> bool:
        """Whether one trace has all of these spans."""
        return any(set(hops) <= spans for spans in list(self.traces.values()))


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server, collected = grpc.server(futures.ThreadPoolExecutor(4)), Collector()
    add_TraceServiceServicer_to_server(collected, server)
    add_MetricsServiceServicer_to_server(collected, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collected, f"http://127.0.0.1:{port}"
    server.stop(None)


def test_each_step_of_a_run_is_one_trace(collector: tuple[Collector, str], tmp_path: Path) -> None:
    collected, endpoint = collector
    running = sim_mesh(
        tmp_path / "state",
        "seven",
        OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
        OTEL_EXPORTER_OTLP_HEADERS="=".join(KEY),
        OTEL_BSP_SCHEDULE_DELAY="100",
        OTEL_METRIC_EXPORT_INTERVAL="500",
    ).start()
    try:
        job = Job(tmp_path / "job", steps=3)
        finish(running, submit(running, running.plan(job.write()), job))
        deadline = time.monotonic() + 30
        while not (collected.whole(SAMPLED) and collected.whole(TRAINED) and collected.meters >= METERS):
            assert time.monotonic() < deadline, (collected.traces.values(), collected.meters)
            time.sleep(0.1)
    finally:
        stop(running)
