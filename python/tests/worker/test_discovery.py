"""Concurrent calls to a service that stops and comes back."""

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
from rollout_workers.worker.discovery import Services, call, connect


class Restarting(BufferServiceServicer):
    """Is about to answer `slow`, and refuses the first call of anybody else as a server that is
    going away."""

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


class Known(Services):
    """A mesh with one service."""

    def __init__(self, address: str) -> None:
        super().__init__("127.0.0.1:1", "token")
        self._address = address

    def _look_up(self, service: str, worker: tuple[str, str] | None) -> str:
        return self._address


async def test_who_looks_a_service_up_again_cancels_no_other_call() -> None:
    server, buffer = grpc.aio.server(), cast(Any, Restarting)()
    add_BufferServiceServicer_to_server(buffer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    services = Known(f"127.0.0.1:{port}")

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
    """The same in a fiftieth of the time, where it is a time."""
    return tuple((name, value // 50 if name.endswith("_ms") else value) for name, value in options)


async def test_a_call_to_a_host_that_is_gone_without_a_word_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays, as where a host lost its power; nothing more comes from it."""
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
    """gRPC's default closes connections that ping more than twice in five minutes of a long
    call."""
    monkeypatch.setattr(discovery, "CHANNEL_OPTIONS", quicker(discovery.CHANNEL_OPTIONS))
    server, buffer = grpc.aio.server(options=quicker(SERVER_OPTIONS)), cast(Any, Restarting)()
    add_BufferServiceServicer_to_server(buffer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = connect(f"127.0.0.1:{port}", None)
    waiting = asyncio.ensure_future(BufferServiceStub(channel).GetMissing(GetMissingRequest(run_id="slow")))
    await buffer.held.wait()
    await asyncio.sleep(8)  # seven times: it asks once a second at most
    buffer.release.set()
    assert await waiting == GetMissingResponse()
    await channel.close()
    await server.stop(None)
