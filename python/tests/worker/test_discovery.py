"""Calls to a service that stops and starts again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from rollout.buffer.v1.buffer_pb2 import GetMissingRequest, GetMissingResponse
from rollout.buffer.v1.buffer_pb2_grpc import (
    BufferServiceServicer,
    BufferServiceStub,
    add_BufferServiceServicer_to_server,
)
from rollout.channel import SERVER_OPTIONS
from rollout_workers.worker import discovery
from rollout_workers.worker.credential import Token
from rollout_workers.worker.discovery import Services, call, connect


class Restarting(BufferServiceServicer):
    """A service that holds the answer to the call `slow`, and rejects other calls like a server
    that is shutting down."""

    def __init__(self) -> None:
        self.held, self.refused, self.release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def GetMissing(self, request: GetMissingRequest, context: Any) -> GetMissingResponse:
        if request.run_id == "slow":
            self.held.set()
            await self.release.wait()
        elif not self.refused.is_set():
            self.refused.set()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        return GetMissingResponse()


class OneService(Services):
    """A registry with one service."""

    def __init__(self, address: str) -> None:
        super().__init__("127.0.0.1:1", Token("token"))
        self._address = address

    async def _find(self, service: str, worker: tuple[str, str] | None) -> str:
        return self._address


async def test_a_new_lookup_does_not_cancel_pending_calls() -> None:
    server, buffer = grpc.aio.server(), cast(Any, Restarting)()
    add_BufferServiceServicer_to_server(buffer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    services = OneService(f"127.0.0.1:{port}")

    async def ask(run: str) -> GetMissingResponse:
        return await call(services, "buffer", BufferServiceStub, "GetMissing", GetMissingRequest(run_id=run), timeout=60)

    slow = asyncio.create_task(ask("slow"))
    await buffer.held.wait()
    assert await ask("other") == GetMissingResponse()
    assert buffer.refused.is_set() and not slow.done()
    buffer.release.set()
    assert await slow == GetMissingResponse()
    await services.close()
    await server.stop(None)


def quicker(options: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """The keepalive options with times divided by fifty."""
    return tuple((name, value // 50 if name.endswith("_ms") else value) for name, value in options)


async def test_a_call_to_a_host_that_vanished_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays open but nothing arrives, like after a power failure of the host."""
    monkeypatch.setattr(discovery, "CHANNEL_OPTIONS", quicker(discovery.CHANNEL_OPTIONS))
    server, buffer = grpc.aio.server(), cast(Any, Restarting)()
    add_BufferServiceServicer_to_server(buffer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gone = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not gone.is_set():
                writer.write(data)

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))

    proxy = await asyncio.start_server(between, "127.0.0.1", 0)
    channel = connect(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", None)
    waiting = asyncio.ensure_future(BufferServiceStub(channel).GetMissing(GetMissingRequest(run_id="slow")))
    await buffer.held.wait()
    gone.set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(60):
            await waiting
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    buffer.release.set()
    await channel.close()
    proxy.close()
    await server.stop(None)


async def test_servers_accept_frequent_keepalive_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's default closes a connection that pings more than twice in five minutes of one call."""
    monkeypatch.setattr(discovery, "CHANNEL_OPTIONS", quicker(discovery.CHANNEL_OPTIONS))
    server, buffer = grpc.aio.server(options=quicker(SERVER_OPTIONS)), cast(Any, Restarting)()
    add_BufferServiceServicer_to_server(buffer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = connect(f"127.0.0.1:{port}", None)
    waiting = asyncio.ensure_future(BufferServiceStub(channel).GetMissing(GetMissingRequest(run_id="slow")))
    await buffer.held.wait()
    await asyncio.sleep(8)  # seven pings, at most one per second
    buffer.release.set()
    assert await waiting == GetMissingResponse()
    await channel.close()
    await server.stop(None)
