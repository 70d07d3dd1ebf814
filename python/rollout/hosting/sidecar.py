# pyright: basic
"""Plugins in a sidecar: a process that serves ``rollout.plugin.v1`` over gRPC, in any language.

``python -m rollout.hosting.sidecar reward.py:exact_match --address unix:/tmp/reward.sock`` starts
one for Python. ``Sidecar`` is the client.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
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
from rollout.hosting.exchange import checked, split
from rollout.hosting.host import NO_DEADLINE, RESPONSES, Host, request_type
from rollout.hosting.manifest import Tls
from rollout.hosting.parent import end_with_parent
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout.plugin.v1.plugin_pb2_grpc import PluginServiceStub

SERVICE = "rollout.plugin.v1.PluginService"
ADDRESS_VARIABLE = "ROLLOUT_PLUGIN_ADDRESS"
ARGS_VARIABLE = "ROLLOUT_PLUGIN_ARGS"
"""The environment variables of a sidecar that a worker starts."""
_DETAILS = "grpc-status-details-bin"
_START_SECONDS = 120.0


class Sidecar:
    """A :class:`~rollout.hosting.runner.Runner` over a service at ``unix:/path`` or ``host:port``.
    It starts no process. Requests are split as the handshake's ``max_batch`` asks, and answers are
    checked: they come from a program in any language."""

    def __init__(self, address: str, *, name: str = "", tls: Tls | None = None) -> None:
        """name: of the plugin, for errors; the address without it. tls: for another host."""
        self._address, self._tls = address, tls
        self._name = f"`{name}`" if name else f"the sidecar at {address}"
        self._most = 0
        self._channel: grpc.aio.Channel | None = None

    async def start(self, seconds: float | None = None) -> pb.HandshakeResponse:
        """Wait until the service is healthy, two minutes or ``seconds``, then compare schema
        versions."""
        self._channel = _channel(self._address, self._tls)
        status = await self._health(_START_SECONDS if seconds is None else seconds, wait=True)
        if status != health_pb2.HealthCheckResponse.SERVING:
            await self.close()
            raise wire.PluginUnavailable(f"the sidecar at {self._address} is not serving", fix="see the sidecar's log")
        try:
            answer = await self.call("Handshake", pb.HandshakeRequest(schema_version=wire.SCHEMA_VERSION), 10.0)
            if answer.schema_version != wire.SCHEMA_VERSION:
                raise wire.PluginSchema(
                    f"{self._name} has version {answer.schema_version} of rollout.plugin.v1, this rollout {wire.SCHEMA_VERSION}",
                    fix="update the one with the older version",
                )
        except BaseException:
            await self.close()
            raise
        self._most = answer.max_batch
        return answer

    async def healthy(self, seconds: float) -> bool:
        """Whether the service answers a health check within this time."""
        try:
            return await self._health(seconds, wait=False) == health_pb2.HealthCheckResponse.SERVING
        except wire.PluginUnavailable:
            return False

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        parts = split(method, request, self._most)
        if len(parts) == 1:
            return checked(self._name, method, request, await self._call(method, request, timeout))
        answers = await asyncio.gather(*(self._call(method, part, timeout) for part in parts))
        joined = RESPONSES[method]()
        for part, answer in zip(parts, answers, strict=True):
            joined.MergeFrom(checked(self._name, method, part, answer))
        return joined

    async def _call(self, method: str, request: Any, timeout: float) -> Any:
        if self._channel is None:
            raise wire.PluginExited(f"{self._name} is closed")
        try:
            limit = timeout if timeout < NO_DEADLINE else None
            return await getattr(PluginServiceStub(self._channel), method)(request, timeout=limit)
        except grpc.aio.AioRpcError as error:
            raise self._error(method, request, timeout, error) from error

    async def _health(self, seconds: float, *, wait: bool) -> Any:
        assert self._channel is not None
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            return (await health.Check(request, timeout=seconds, wait_for_ready=wait)).status
        except grpc.aio.AioRpcError as error:
            if wait:
                await self.close()
            text = f"the sidecar at {self._address} does not answer: {error.details()}"
            raise wire.PluginUnavailable(text, fix="start the sidecar, or correct its address") from error

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
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            text, fix = f"{what}: {self._name} has ended: {error.details()}", "see its output in the worker's log"
            return wire.EnvironmentExited(text, fix=fix) if wire.of_environment(method) else wire.PluginExited(text, fix=fix)
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return wire.PluginUnsupported(f"{self._name} does not implement {method}", fix="implement it in the sidecar")
        return wire.PluginError(
            f"{what}: {self._name} failed with {error.code().name}: {error.details()}", fix="see its output in the worker's log"
        )


def _channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    # Without keepalive: servers of other languages end connections with a ping every ten seconds.
    options = [option for option in OPTIONS if option[0].endswith("message_length")]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    ca, key, cert = (path.read_bytes() for path in (tls.ca, tls.key, tls.cert))
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)


async def serve(host: Host, address: str, credentials: grpc.ServerCredentials | None = None) -> grpc.aio.Server:
    """Serve a host until the server stops. credentials: of TLS; None: none, for this host only."""
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
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    if not port:
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
    args = os.environ.get(ARGS_VARIABLE, "")
    sources = [{"kind": kind or "reward", "plugin": plugin, "args": args} for kind, _, plugin in named]
    host = Host.load(sources, ThreadPoolExecutor(4, "plugin"), version=arguments.version)
    server = await serve(host, arguments.address)
    if ADDRESS_VARIABLE in os.environ:
        threading.Thread(target=_end_with_input, daemon=True).start()
        end_with_parent()
    await server.wait_for_termination()


def _end_with_input() -> None:
    """Exit when the standard input closes, because then the worker has ended."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def main(given: Sequence[str] | None = None) -> None:
    """Serve Python plugins until the process stops."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout.hosting.sidecar", description="Serve plugins over rollout.plugin.v1."
    )
    parser.add_argument("plugin", nargs="+", help="file.py:name of a reward, or KIND=file.py:name")
    address = os.environ.get(ADDRESS_VARIABLE)
    parser.add_argument(
        "--address",
        default=address,
        required=address is None,
        help=f"unix:/path or host:port (default: {ADDRESS_VARIABLE}); no authentication: keep it on this host",
    )
    parser.add_argument("--version", default="", help="version of the plugins, as in their manifest")
    asyncio.run(_run(parser.parse_args(given)))


if __name__ == "__main__":
    main()
