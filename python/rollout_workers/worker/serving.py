"""The worker's gRPC server. It authenticates all calls except health checks by a bearer token, and
adds TLS, typed errors, traces, and the validation of requests."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health import SERVICE_NAME
from grpc_reflection.v1alpha import reflection

from rollout.channel import SERVER_OPTIONS
from rollout_workers.worker.status import Unauthenticated, abort
from rollout_workers.worker.telemetry import incoming, span
from rollout_workers.worker.tls import PemFiles
from rollout_workers.worker.validation import validate

log = logging.getLogger(__name__)

_HEALTH = "/grpc.health.v1.Health/"
_REFLECTION = "/grpc.reflection."


HOST_VARIABLE = "ROLLOUT_WORKER_HOST"
"""The address of this host on which a worker serves and registers. If it is not set, the worker
serves on the loopback interface only."""
INSECURE_VARIABLE = "ROLLOUT_WORKER_INSECURE_LISTEN"
"""``true`` allows plain text on an address that is not loopback. Use it only on a private
network."""


class PlainText(Exception):
    """The server would accept tokens in plain text from a network."""

    reason = "PLAIN_TEXT_LISTENER"


def host_of(environment: Mapping[str, str], secure: bool = False) -> str:
    """The host on which this process serves. secure: with TLS. Raises ``PlainText``."""
    host = environment.get(HOST_VARIABLE, "") or "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not secure and not loopback and environment.get(INSECURE_VARIABLE) != "true":
        fix = f"set ca_file in [tls] of rolloutd.toml, or {INSECURE_VARIABLE}=true if the network is private"
        raise PlainText(f"{HOST_VARIABLE}={host} is not loopback: {fix}")
    return host


class Server:
    """A server on a free port of the host that ``ROLLOUT_WORKER_HOST`` names."""

    def __init__(self, token: str, tls: PemFiles | None = None) -> None:
        """tls: the server's files; callers then need a certificate of the same authority. None:
        plain text. Raises ``PlainText``."""
        self._host, self._tls = host_of(os.environ, tls is not None), tls
        self._server = grpc.aio.server(interceptors=[_Edge(token)], options=SERVER_OPTIONS)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = []
        self.address = ""

    @property
    def grpc(self) -> grpc.aio.Server:
        """The server, for the generated ``add_..Servicer_to_server`` functions."""
        return self._server

    async def start(self, services: Sequence[str]) -> str:
        """Start to serve; returns host:port. services: full names, for reflection and health."""
        self._names = [*services]
        reflection.enable_server_reflection((*services, SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        free = f"{self._host}:0"
        port = self._server.add_secure_port(free, self._tls.server()) if self._tls else self._server.add_insecure_port(free)
        self.address = f"{self._host}:{port}"
        await self._server.start()
        for name in ("", *services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return self.address

    async def stop(self, grace_seconds: float) -> None:
        """Reject new calls, and let running ones finish for at most ``grace_seconds``."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)


class _Edge(grpc.aio.ServerInterceptor):
    """Authenticates, traces, and validates each call, and maps its errors."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_HEALTH):
            return handler
        metadata = {key: value for key, value in handler_call_details.invocation_metadata if isinstance(value, str)}
        given = metadata.get("authorization", "").encode()
        allowed = hmac.compare_digest(given, self._expected)
        if not allowed:
            return _REFUSED
        if method.startswith(_REFLECTION):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _stream(cast(Any, handler.unary_stream), method, metadata),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _unary(cast(Any, handler.unary_unary), method, metadata),
            handler.request_deserializer,
            handler.response_serializer,
        )


def _unary(behavior: Callable[..., Awaitable[Any]], method: str, metadata: dict[str, str]) -> Any:
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            validate(request)
            with span(method.strip("/"), [incoming(metadata)]):
                return await behavior(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, error)

    return handle


def _stream(behavior: Callable[..., AsyncIterator[Any]], method: str, metadata: dict[str, str]) -> Any:
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            validate(request)
            with span(method.strip("/"), [incoming(metadata)]):
                async for response in behavior(request, context):
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, error)

    return handle


async def _refuse(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
    error = Unauthenticated("the call has no token or a wrong one", fix="send metadata `authorization: Bearer <token>`")
    await abort(context, error)
    yield  # makes this function a generator


_REFUSED = grpc.stream_stream_rpc_method_handler(cast(Any, _refuse))
"""The handler of calls without the token. It reads no request, so nothing of them is decoded."""
