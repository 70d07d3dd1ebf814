"""Finds the services of the mesh and keeps a channel to each."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import grpc

from rollout.errors import RolloutError
from rollout_workers.mesh.agent import agent
from rollout_workers.mesh.telemetry import outgoing

log = logging.getLogger(__name__)

Stub = TypeVar("Stub")
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class ServiceUnavailable(RolloutError):
    """No instance of a service passes its health check."""

    reason: ClassVar[str] = "SERVICE_UNAVAILABLE"


class Services:
    """Stubs of the mesh's services by their name in the registry (``buffer``, ``storage``)."""

    def __init__(self, agent: str, token: str, *, consul_token: str = "", ca_file: str = "") -> None:
        """agent: host:port of the Consul agent, or its URL; ca_file: of an agent at https. token: bearer token of the mesh."""
        self._agent, self._ca_file = agent, ca_file
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._headers = {"X-Consul-Token": consul_token} if consul_token else {}
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def stub(self, service: str, make: Callable[[grpc.aio.Channel], Stub]) -> Stub:
        """A stub on the kept channel; the first call looks the service up. Raises :class:`ServiceUnavailable`."""
        channel = self._channels.get(service)
        if channel is None:
            address = await asyncio.to_thread(self._look_up, service)
            channel = self._channels.setdefault(service, grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))
        return make(channel)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What to send with each call: the token and the trace."""
        return self._metadata + tuple(outgoing().items())

    async def forget(self, service: str) -> None:
        """Look the service up again at the next call: it answered UNAVAILABLE and may have moved."""
        channel = self._channels.pop(service, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        for service in list(self._channels):
            await self.forget(service)

    def _look_up(self, service: str) -> str:
        connection = agent(self._agent, timeout=5, ca_file=self._ca_file)
        try:
            connection.request("GET", f"/v1/health/service/{quote(service)}?passing=true", headers=self._headers)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnavailable(f"the registry at {self._agent} can't be reached: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServiceUnavailable(f"the registry at {self._agent} answered HTTP {response.status} for `{service}`")
        entries: list[dict[str, Any]] = json.loads(body) or []
        if not entries:
            raise ServiceUnavailable(f"no instance of `{service}` is healthy", mend=f"start rolloutd with `{service}`")
        entry = entries[0]
        host = entry["Service"].get("Address") or entry["Node"]["Address"]
        return f"{host}:{entry['Service']['Port']}"


async def call(services: Services, service: str, make: Callable[[grpc.aio.Channel], Stub], method: str, request: Any,
               *, timeout: float = 10.0, tries: int = 5) -> Any:  # fmt: skip
    """A unary call that survives a restart of the service: UNAVAILABLE and an empty registry are tried again, a second apart
    at most. The last failure is raised as it is."""
    for attempt in range(tries):
        last = attempt == tries - 1
        try:
            stub = await services.stub(service, make)
            return await getattr(stub, method)(request, timeout=timeout, metadata=services.metadata())
        except ServiceUnavailable:
            if last:
                raise
        except grpc.aio.AioRpcError as error:
            if last or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await services.forget(service)
        await asyncio.sleep(min(1.0, 0.1 * 2**attempt))
    raise AssertionError("unreachable")
