# pyright: basic
"""Plugins in a sidecar: a process that serves ``rollout.plugin.v1`` over gRPC, in any language.

``python -m rollout.hosting.sidecar reward.py:exact_match --address unix:/tmp/reward.sock`` starts
one for Python. ``Sidecar`` is the client.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.rpc import status_pb2  # pyright: ignore[reportMissingTypeStubs]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from rollout.channel import OPTIONS, SERVER_OPTIONS
from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.host import RESPONSES, Host, request_type
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout.plugin.v1.plugin_pb2_grpc import PluginServiceStub

SERVICE = "rollout.plugin.v1.PluginService"
_DETAILS = "grpc-status-details-bin"
_START_SECONDS = 120.0


class Sidecar:
    """A :class:`~rollout.hosting.runner.Runner` over a service at ``unix:/path`` or ``host:port``.
    It starts no process."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> pb.HandshakeResponse:
        """Wait up to two minutes until the service is healthy, then compare schema versions."""
        self._channel = grpc.aio.insecure_channel(self._address, options=OPTIONS)
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            answer = await health.Check(request, timeout=_START_SECONDS, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            await self.close()
            text = f"the sidecar at {self._address} does not answer: {error.details()}"
            raise wire.PluginUnavailable(text, fix="start the sidecar, or correct its address") from error
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            await self.close()
            raise wire.PluginUnavailable(f"the sidecar at {self._address} is not serving", fix="see the sidecar's log")
        return await self.call("Handshake", pb.HandshakeRequest(schema_version=wire.SCHEMA_VERSION), 10.0)

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        assert self._channel is not None
        try:
            return await getattr(PluginServiceStub(self._channel), method)(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise self._error(method, request, timeout, error) from error

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _error(self, method: str, request: Any, timeout: float, error: grpc.aio.AioRpcError) -> RolloutError:
        for key, value in error.trailing_metadata() or ():
            if key == _DETAILS and isinstance(value, bytes):
                return wire.error_of(status_pb2.Status.FromString(value))
        what = wire.describe(method, request)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return wire.timeout_error(method, timeout, what)
        return wire.ended_error(
            method, f"{what}: the sidecar at {self._address} failed: {error.details()}", "see the sidecar's log"
        )


async def serve(host: Host, address: str) -> grpc.aio.Server:
    """Serve a host until the server stops."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {
        method: grpc.unary_unary_rpc_method_handler(
            _handler(host, method),
            request_deserializer=request_type(method).FromString,
            response_serializer=RESPONSES[method].SerializeToString,
        )
        for method in RESPONSES
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if not server.add_insecure_port(address):
        raise OSError(f"can't listen at {address}")
    await server.start()
    await health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    return server


def _handler(host: Host, method: str) -> Any:
    async def handle(request: Any, context: Any) -> Any:
        try:
            return await host.call(method, request)
        except RolloutError as error:
            status = wire.status_of(error)
            code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
            await context.abort(code, status.message, trailing_metadata=((_DETAILS, status.SerializeToString()),))

    return handle


async def _run(arguments: argparse.Namespace) -> None:
    named = [plugin.rpartition("=") for plugin in arguments.plugin]
    sources = [{"kind": kind or "reward", "plugin": plugin} for kind, _, plugin in named]
    server = await serve(Host.load(sources, ThreadPoolExecutor(4, "plugin")), arguments.address)
    await server.wait_for_termination()


def main(given: Sequence[str] | None = None) -> None:
    """Serve Python plugins until the process stops."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout.hosting.sidecar", description="Serve plugins over rollout.plugin.v1."
    )
    parser.add_argument("plugin", nargs="+", help="file.py:name of a reward, or KIND=file.py:name")
    parser.add_argument("--address", required=True, help="unix:/path or host:port; no authentication: keep it on this host")
    asyncio.run(_run(parser.parse_args(given)))


if __name__ == "__main__":
    main()
