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

from rollout import names
from rollout.channel import OPTIONS
from rollout.errors import RolloutError
from rollout.run.v1.run_pb2 import VerifyWorkersRequest
from rollout.run.v1.run_pb2_grpc import SchedulerInternalServiceStub
from rollout_workers.worker.credential import NO_TOKEN, Token
from rollout_workers.worker.seal import Seal, address_of
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
_VERIFY_SECONDS = 5.0


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
        token: Token,
        *,
        services_key: str = "",
        peer_token: str = "",
        consul_token: Token = NO_TOKEN,
        agent_files: PemFiles = NO_FILES,
        tls: PemFiles | None = None,
    ) -> None:
        """agent: host:port of the Consul agent, or its URL. token: credential for services.
        services_key: the public key of the registrations of services; empty: no service is called.
        peer_token: the token that the other workers of the run accept.
        agent_files: the TLS files for an agent at https. tls: the client's files for services;
        None: plain text."""
        self._agent, self._agent_files, self._tls = agent, agent_files, tls
        self._token, self._consul_token = token, consul_token
        self._peer_metadata = (("authorization", f"Bearer {peer_token}"),)
        self._seal = Seal(services_key)
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
            address = await self._find(service, worker)
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
        return (("authorization", f"Bearer {self._token()}"), *outgoing().items())

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

    async def _find(self, service: str, worker: tuple[str, str] | None) -> str:
        """host:port of a service that signed its registration, or of a worker that the scheduler
        has launched. No other process is dialed."""
        entries = await asyncio.to_thread(self._look_up, service)
        if worker is None:
            entries = self._seal.services(service, entries)
            if not entries:
                raise ServiceUnavailable(f"no instance of `{service}` is healthy", fix=f"start rolloutd with `{service}`")
            return address_of(entries[0])
        entries = [e for e in entries if _worker_of(e["Service"].get("Meta") or {}) == worker]
        for entry in entries:
            if await self._launched(entry):
                return address_of(entry)
        raise ServiceUnavailable(f"worker {worker[1]} of run {worker[0]} is not in the registry", fix="see the worker's log")

    async def _launched(self, entry: dict[str, Any]) -> bool:
        """Whether a worker's registration belongs to its newest launch, which the scheduler
        knows."""
        meta: dict[str, str] = entry["Service"]["Meta"]
        request = VerifyWorkersRequest(run_id=meta["run"], incarnation=_number(meta.get("incarnation")))
        claim = request.workers.add(worker_id=meta["worker"], rank=_number(meta.get("rank")))
        claim.address, claim.proof = address_of(entry), meta.get("proof", "")
        scheduler = await self.stub(names.SCHEDULER_SERVICE, SchedulerInternalServiceStub)
        try:
            response = await scheduler.VerifyWorkers(request, timeout=_VERIFY_SECONDS, metadata=self.metadata())
        except grpc.aio.AioRpcError as error:
            self.forget(names.SCHEDULER_SERVICE)
            raise ServiceUnavailable(f"the scheduler does not verify {claim.worker_id}: {error.details()}") from error
        return list(response.accepted) == [True]

    def _look_up(self, service: str) -> list[dict[str, Any]]:
        token = self._consul_token()
        headers = {"X-Consul-Token": token} if token else {}
        connection = agent_connection(self._agent, timeout=5, files=self._agent_files)
        try:
            connection.request("GET", f"/v1/health/service/{quote(service)}?passing=true", headers=headers)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnavailable(f"the registry at {self._agent} can't be reached: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServiceUnavailable(f"the registry at {self._agent} answered HTTP {response.status} for `{service}`")
        entries: list[dict[str, Any]] = json.loads(body) or []
        return entries


def _name(service: str, worker: tuple[str, str] | None) -> str:
    return service if worker is None else "/".join((service, *worker))


def _number(text: str | None) -> int:
    """0 if the text is not a number of at most nine digits."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else 0


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
