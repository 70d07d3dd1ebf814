"""With an endpoint, spans and metrics are exported in the caller's trace. Without one, nothing is
recorded."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
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

PARENT = "0af7651916cd43dd8448eb211c80319c"
OTHER = "1bf7651916cd43dd8448eb211c80319c"
WORKER = f"""
import sys
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.telemetry import Meters, configure, flush, incoming, outgoing, span

configure(sys.argv[1], Identity("run-1", "inference-0", "inference", 1, "abc"))
parents = [incoming({{"traceparent": f"00-{{trace}}-b7ad6b7169203331-01"}}) for trace in ("{PARENT}", "{OTHER}")]
with span("sample", parents, groups=2):
    print(outgoing()["traceparent"])
Meters().samples.add(3)
flush()
"""


class Collector(TraceServiceServicer, MetricsServiceServicer):
    """Receives traces and metrics."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}

    async def Export(self, request: Any, context: Any) -> Any:
        if isinstance(request, traces.ExportTraceServiceRequest):
            self.spans.extend(request.resource_spans)
            return traces.ExportTraceServiceResponse()
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics.update({metric.name: metric for metric in scope.metrics})
        return metrics.ExportMetricsServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server, collected = grpc.aio.server(), Collector()
    add_TraceServiceServicer_to_server(collected, server)
    add_MetricsServiceServicer_to_server(collected, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield collected, f"127.0.0.1:{port}"
    await server.stop(None)


async def run(endpoint: str) -> str:
    """The header that a span sends. Runs in a separate process because providers are set once per
    process."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, endpoint, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode().strip()


async def test_spans_and_metrics_reach_the_collector(collector: tuple[Collector, str]) -> None:
    collected, endpoint = collector
    header = await run(endpoint)
    [resource] = collected.spans
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert attributes["service.name"] == "inference-worker"
    assert (attributes["rollout.run"], attributes["service.instance.id"]) == ("run-1", "abc")
    [made] = resource.scope_spans[0].spans
    assert (made.name, made.trace_id.hex()) == ("sample", PARENT)
    assert [link.trace_id.hex() for link in made.links] == [OTHER]
    assert header == f"00-{PARENT}-{made.span_id.hex()}-01"
    assert collected.metrics["rollout.samples"].sum.data_points[0].as_int == 3


async def test_without_an_endpoint_the_callers_trace_is_passed_on(collector: tuple[Collector, str]) -> None:
    assert await run("") == f"00-{PARENT}-b7ad6b7169203331-01"
    assert collector[0].spans == []
