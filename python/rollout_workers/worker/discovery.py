"""Finds the services of the mesh in the registry, keeps a channel to each, and retries calls."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import grpc

from rollout.channel import OPTIONS
from rollout.errors import RolloutError
from rollout_workers.worker.telemetry import outgoing
from rollout_workers.worker.tls import NO_FILES, PemFiles

log = logging.getLogger(__name__)

Stub = TypeVar("Stub")
CHANNEL_OPTIONS = (
    *OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_GRACE_SECONDS = 60.0


def agent_connection(address: str, *, timeout: float, files: PemFiles) -> http.client.HTTPConnection:
    """A connection to a Consul agent or to the embedded registry; it opens at the first request.

    address: ``host:port``, optionally after ``http://`` or ``https://``. files: the TLS files for
    https.
    """
    scheme, found, host = address.partition("://")
    if not found:
        scheme, host = "http", address
    host = host.rstrip("/")
    if scheme == "https":
        return http.client.HTTPSConnection(host, timeout=timeout, context=files.context())
    return http.client.HTTPConnection(host, timeout=timeout)


def connect(address: str, tls: PemFiles | None) -> grpc.aio.Channel:
    """A channel to a service or a worker at host:port. tls: the client's files; None: plain text.

    Raises :class:`~rollout_workers.worker.tls.CertificateError`.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, tls.channel(), options=CHANNEL_OPTIONS)


class ServiceUnavailable(RolloutError):
    """No instance of a service passes its health check."""

    reason: ClassVar[str] = "SERVICE_UNAVAILABLE"


class Services:
    """Stubs of the mesh's services by their name in the registry (``buffer``, ``storage``)."""

    def __init__(
        self,
        agent: str,
        token: str,
        *,
        peer_token: str = "",
        consul_token: str = "",
        agent_files: PemFiles = NO_FILES,
        tls: PemFiles | None = None,
    ) -> None:
        """agent: host:port of the Consul agent, or its URL. token: credential for services.
        peer_token: the token that the other workers of the run accept.
        agent_files: the TLS files for an agent at https. tls: the client's files for services;
        None: plain text."""
        self._agent, self._agent_files, self._tls = agent, agent_files, tls
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._peer_metadata = (("authorization", f"Bearer {peer_token}"),)
        self._headers = {"X-Consul-Token": consul_token} if consul_token else {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stamp = tls.stamp() if tls else ()
        self._closing: set[asyncio.Task[None]] = set()

    async def stub(
        self, service: str, make: Callable[[grpc.aio.Channel], Stub], *, worker: tuple[str, str] | None = None
    ) -> Stub:
        """A stub of the service. The first call, and the first after the certificates changed,
        looks up the address and opens a channel; later calls share the channel.

        worker: (run, worker id) if the service belongs to a worker. Raises
        :class:`ServiceUnavailable`.
        """
        self._renew()
        name = _name(service, worker)
        channel = self._channels.get(name)
        if channel is None:
            address = await asyncio.to_thread(self._look_up, service, worker)
            channel = self._channels.setdefault(name, connect(address, self._tls))
        return make(channel)

    def peer(self, address: str, make: Callable[[grpc.aio.Channel], Stub]) -> Stub:
        """A stub of another worker at host:port. Calls to one address share a channel."""
        self._renew()
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = connect(address, self._tls)
        return make(channel)

    def _renew(self) -> None:
        """Replace all channels if the certificates changed, because a channel keeps the
        certificates that it was opened with. Pending calls finish."""
        if self._tls is None or (stamp := self._tls.stamp()) == self._stamp:
            return
        self._stamp = stamp
        for name in list(self._channels):
            self._retire(name)

    def _retire(self, name: str) -> None:
        """Stop using a channel but let its pending calls finish. Closing it now would cancel them,
        and a caller could not distinguish that from its own cancellation."""
        channel = self._channels.pop(name, None)
        if channel is not None:
            task = asyncio.create_task(channel.close(_GRACE_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of each call of a service: the token and the trace context."""
        return self._metadata + tuple(outgoing().items())

    def peer_metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of each call of another worker of the run."""
        return self._peer_metadata + tuple(outgoing().items())

    def forget(self, service: str, *, worker: tuple[str, str] | None = None) -> None:
        """Look up the service again at the next call, because it answered UNAVAILABLE and may have
        moved. Pending calls continue."""
        self._retire(_name(service, worker))

    async def close(self) -> None:
        for name in list(self._channels):
            await self._channels.pop(name).close()
        for task in list(self._closing):
            task.cancel()

    def _look_up(self, service: str, worker: tuple[str, str] | None) -> str:
        connection = agent_connection(self._agent, timeout=5, files=self._agent_files)
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
        if worker is not None:
            entries = [e for e in entries if _worker_of(e["Service"].get("Meta") or {}) == worker]
            if not entries:
                raise ServiceUnavailable(
                    f"worker {worker[1]} of run {worker[0]} is not in the registry", fix="see the worker's log"
                )
        if not entries:
            raise ServiceUnavailable(f"no instance of `{service}` is healthy", fix=f"start rolloutd with `{service}`")
        entry = entries[0]
        host = entry["Service"].get("Address") or entry["Node"]["Address"]
        return f"{host}:{entry['Service']['Port']}"


def _name(service: str, worker: tuple[str, str] | None) -> str:
    return service if worker is None else "/".join((service, *worker))


def _worker_of(meta: dict[str, str]) -> tuple[str, str]:
    return meta.get("run", ""), meta.get("worker", "")


async def call(services: Services, service: str, make: Callable[[grpc.aio.Channel], Stub], method: str, request: Any,
               *, timeout: float = 10.0, tries: int = 5) -> Any:  # fmt: skip
    """Make a unary call that survives a restart of the service.

    Retries up to ``tries`` times, at most a second apart, while the service answers UNAVAILABLE or
    the registry has no instance of it. Raises the last error.
    """
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
            services.forget(service)
        await asyncio.sleep(min(1.0, 0.1 * 2**attempt))
    raise AssertionError("unreachable")


async def attempts(problem: str, *, first: float = 0.1, most: float = 1.0) -> AsyncIterator[int]:
    """Yield attempt numbers from 0 without end, and wait longer after each, from ``first`` to at
    most ``most`` seconds. The caller leaves the loop on success. ``problem`` is logged after the
    third attempt."""
    attempt = 0
    while True:
        yield attempt
        attempt += 1
        if attempt == 3:
            log.warning("%s; retrying", problem)
        await asyncio.sleep(min(most, first * 2**attempt))
