"""Calls to a service that goes and comes back, beside each other."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc

from rollout.buffer.v1.buffer_pb2 import GetMissingRequest, GetMissingResponse
from rollout.buffer.v1.buffer_pb2_grpc import (
    BufferServiceServicer,
    BufferServiceStub,
    add_BufferServiceServicer_to_server,
)
from rollout_workers.mesh.discovery import Services, call


class Restarting(BufferServiceServicer):
    """Is about to answer `slow`, and refuses the first call of anybody else as a server that is going away."""

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
