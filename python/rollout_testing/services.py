"""Fakes of the services that workers call, registered like real ones."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, cast

import grpc
from blake3 import blake3

from rollout import names
from rollout.buffer.v1 import buffer_pb2 as buffer
from rollout.buffer.v1.buffer_pb2_grpc import BufferServiceServicer, add_BufferServiceServicer_to_server
from rollout.storage.v1 import storage_pb2 as storage
from rollout.storage.v1.storage_pb2_grpc import ArtifactServiceServicer, add_ArtifactServiceServicer_to_server
from rollout_testing.credential import services_key, sign
from rollout_workers.worker.credential import Token
from rollout_workers.worker.discovery import Services


class Agent(Protocol):
    """The address of the registry, and its token."""

    @property
    def consul(self) -> str: ...

    @property
    def token(self) -> str: ...


def services_of(agent: Agent) -> Services:
    """The services that are registered with an agent."""
    token = Token(agent.token)
    return Services(agent.consul, token, services_key=services_key(agent.token), consul_token=token)


class BufferDouble(BufferServiceServicer):
    """Answers GetMissing from ``missing`` (key (epoch, index) -> samples; other groups have no
    samples) and ReadPayloads from ``payloads`` (step -> payloads)."""

    def __init__(self, group_size: int = 4) -> None:
        self.group_size = group_size
        self.missing: dict[tuple[int, int], list[int]] = {}
        self.payloads: dict[int, Sequence[bytes]] = {}
        self.asked: list[tuple[int, int]] = []
        self.metadata: list[dict[str, Any]] = []

    async def GetMissing(self, request: buffer.GetMissingRequest, context: Any) -> buffer.GetMissingResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        keys = [(group.epoch, group.index) for group in request.groups]
        self.asked.extend(keys)
        every = list(range(self.group_size))
        return buffer.GetMissingResponse(groups=[buffer.MissingSamples(samples=self.missing.get(key, every)) for key in keys])

    async def ReadPayloads(self, request: buffer.ReadPayloadsRequest, context: Any) -> AsyncIterator[buffer.ReadPayloadsResponse]:
        for payload in self.payloads[request.step]:
            yield buffer.ReadPayloadsResponse(payloads=[payload])


class StorageDouble(ArtifactServiceServicer):
    """Stores artifacts in memory."""

    def __init__(self) -> None:
        self.artifacts: dict[str, bytes] = {}

    async def PutArtifact(
        self, request_iterator: AsyncIterator[storage.PutArtifactRequest], context: Any
    ) -> storage.PutArtifactResponse:
        content = b"".join([request.chunk async for request in request_iterator])
        name = f"blake3-{blake3(content).hexdigest()}"
        self.artifacts[name] = content
        return storage.PutArtifactResponse(content_id=name, bytes=len(content))


def buffer_double() -> BufferDouble:
    """A fake buffer without the methods that workers never call."""
    return cast(Any, BufferDouble)()


def storage_double() -> StorageDouble:
    """A fake artifact service without the methods that workers never call."""
    return cast(Any, StorageDouble)()


class Host:
    """Serves fakes on the loopback interface and registers them without an expiry."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._server = grpc.aio.server()
        self._names: list[str] = []

    def buffer(self, double: BufferServiceServicer) -> None:
        add_BufferServiceServicer_to_server(double, self._server)
        self._names.append(names.BUFFER_SERVICE)

    def storage(self, double: ArtifactServiceServicer) -> None:
        add_ArtifactServiceServicer_to_server(double, self._server)
        self._names.append(names.STORAGE_SERVICE)

    async def start(self) -> None:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        for name in self._names:
            check = {"TTL": "1h", "Status": "passing"}
            body = {"ID": name, "Name": name, "Address": "127.0.0.1", "Port": port, "Check": check}
            put(self._agent, "/v1/agent/service/register", sign(self._agent.token, body))

    async def stop(self) -> None:
        for name in self._names:
            put(self._agent, f"/v1/agent/service/deregister/{name}")
        await self._server.stop(None)


def put(agent: Agent, path: str, body: Any = None) -> None:
    """Send a PUT request to the agent."""
    data = json.dumps(body).encode() if body is not None else b""
    _open(agent, path, data, "PUT")


def passing(agent: Agent, service: str) -> list[dict[str, Any]]:
    """The healthy instances of a service: ``{"ID", "Address", "Port", "Meta", ..}`` each."""
    answer = _open(agent, f"/v1/health/service/{service}?passing=true", None, "GET")
    return [entry["Service"] for entry in json.loads(answer) or []]


def _open(agent: Agent, path: str, data: bytes | None, method: str) -> bytes:
    request = urllib.request.Request(f"http://{agent.consul}{path}", data, {"X-Consul-Token": agent.token}, method=method)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read()
