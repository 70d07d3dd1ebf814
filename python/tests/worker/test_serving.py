"""Authorization, validation errors, status codes, and traces of a worker's gRPC server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace

from rollout.inference.v1 import inference_pb2 as pb
from rollout.inference.v1.inference_pb2_grpc import (
    InferenceWorkerServiceServicer,
    InferenceWorkerServiceStub,
    add_InferenceWorkerServiceServicer_to_server,
)
from rollout_workers.worker.serving import HOST_VARIABLE, INSECURE_VARIABLE, PlainText, Server, host_of
from rollout_workers.worker.status import EdgeError
from rollout_workers.worker.telemetry import outgoing

TOKEN = "a" * 64
GOOD = (("authorization", f"Bearer {TOKEN}"),)


class Overloaded(EdgeError):
    reason = "OVERLOADED"


class Servicer(InferenceWorkerServiceServicer):
    def __init__(self) -> None:
        self.traces: list[dict[str, str]] = []

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.traces.append(outgoing())
        return pb.TokenizeResponse(max_model_len=7)

    async def PauseEngine(self, request: Any, context: Any) -> pb.PauseEngineResponse:
        raise Overloaded("too much", fix="wait", metadata={"limit": "3"}, retry_seconds=1.5)

    async def ResumeEngine(self, request: Any, context: Any) -> pb.ResumeEngineResponse:
        raise KeyError("secret")

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="one")
        raise Overloaded("in the middle")


@pytest.fixture
async def served() -> AsyncIterator[tuple[InferenceWorkerServiceStub, grpc.aio.Channel, Servicer]]:
    server, servicer = Server(TOKEN), cast(Any, Servicer)()
    add_InferenceWorkerServiceServicer_to_server(servicer, server.grpc)
    address = await server.start(["rollout.inference.v1.InferenceWorkerService"])
    async with grpc.aio.insecure_channel(address) as channel:
        yield InferenceWorkerServiceStub(channel), channel, servicer
    await server.stop(0)


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The details of an error by the name of their type."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    packed = trailers["grpc-status-details-bin"]
    found: dict[str, Any] = {}
    for detail in status_pb2.Status.FromString(packed).details:
        message = getattr(error_details_pb2, detail.TypeName().rpartition(".")[2])()
        detail.Unpack(message)
        found[detail.TypeName().rpartition(".")[2]] = message
    return found


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer nope"),), (("authorization", TOKEN),)])
async def test_a_call_without_the_token_is_rejected(served: tuple, metadata: tuple) -> None:
    stub, _, servicer = served
    request = pb.TokenizeRequest(prompts=[pb.Prompt(text="a")])
    error = await refused(stub.Tokenize(request, metadata=metadata))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    info = details(error)["ErrorInfo"]
    assert (info.reason, info.domain) == ("UNAUTHENTICATED", "rollout")
    assert servicer.traces == []


async def test_health_needs_no_token(served: tuple) -> None:
    answer = await cast(Any, health_pb2_grpc.HealthStub(served[1])).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_error_lists_every_violation(served: tuple) -> None:
    request = pb.GenerateRequest(
        prompts=[pb.Prompt(text="a"), pb.Prompt(), pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="boss")]))],
        params=pb.SamplingParams(temperature=-1, top_p=0),
        n=0,
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in served[0].Generate(request, metadata=GOOD):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    found = details(caught.value)
    assert found["ErrorInfo"].reason == "INVALID_REQUEST"
    assert {violation.field for violation in found["BadRequest"].field_violations} == {
        "request_id",
        "prompts[1].kind",
        "prompts[2].chat.messages[0].role",
        "params.temperature",
        "params.top_p",
        "n",
    }


async def test_a_typed_error_keeps_its_details(served: tuple) -> None:
    error = await refused(served[0].PauseEngine(pb.PauseEngineRequest(), metadata=GOOD))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == "too much; wait"
    found = details(error)
    assert (found["ErrorInfo"].reason, dict(found["ErrorInfo"].metadata)) == ("OVERLOADED", {"limit": "3"})
    assert found["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 1.5


async def test_an_unknown_error_reveals_no_details(served: tuple) -> None:
    error = await refused(served[0].ResumeEngine(pb.ResumeEngineRequest(), metadata=GOOD))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.details())
    assert details(error)["ErrorInfo"].reason == "INTERNAL"


async def test_an_error_inside_a_stream_has_its_reason(served: tuple) -> None:
    request = pb.GenerateRequest(request_id="a", prompts=[pb.Prompt(text="a")], n=1)
    pieces = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for piece in served[0].Generate(request, metadata=GOOD):
            pieces.append(piece.text)
    assert pieces == ["one"]
    assert details(caught.value)["ErrorInfo"].reason == "OVERLOADED"


async def test_trace_contexts_are_passed_on_without_an_exporter(served: tuple) -> None:
    stub, _, servicer = served
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    request = pb.TokenizeRequest(prompts=[pb.Prompt(text="a")])
    await stub.Tokenize(request, metadata=(*GOOD, ("traceparent", parent)))
    await stub.Tokenize(request, metadata=GOOD)
    assert servicer.traces == [{"traceparent": parent}, {}]
    assert not trace.get_current_span().get_span_context().is_valid


def test_plain_text_needs_loopback_or_the_variable_for_private_networks() -> None:
    assert host_of({}) == "127.0.0.1"
    assert host_of({HOST_VARIABLE: "127.0.3.4"}) == "127.0.3.4"
    for host in ("10.0.0.7", "0.0.0.0", "worker-7"):
        with pytest.raises(PlainText, match=INSECURE_VARIABLE):
            host_of({HOST_VARIABLE: host})
        assert host_of({HOST_VARIABLE: host, INSECURE_VARIABLE: "true"}) == host
