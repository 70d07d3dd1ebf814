"""A learner's catalog, a storage service, and a worker's engine, with a simulated network whose
transfers a test can corrupt."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import torch
from blake3 import blake3
from torch import nn

from rollout.storage.v1 import storage_pb2
from rollout.storage.v1.storage_pb2_grpc import ArtifactServiceServicer, add_ArtifactServiceServicer_to_server
from rollout.weights.v1 import weights_pb2 as pb
from rollout.weights.v1.weights_pb2_grpc import add_WeightsServiceServicer_to_server
from rollout_workers.engines.transformers.current_weights import CurrentWeights
from rollout_workers.weights import named_weights, weights_digest, write_weights
from rollout_workers.weights.transfer import service
from rollout_workers.weights.transfer.artifacts import StoredWeights
from rollout_workers.weights.transfer.cache import WeightsCache
from rollout_workers.weights.transfer.catalog import Catalog
from rollout_workers.weights.transfer.fetch import Fetcher
from rollout_workers.weights.transfer.shared_memory import SharedMemory
from rollout_workers.worker.credential import Token
from rollout_workers.worker.discovery import Services
from rollout_workers.worker.spec import Identity

RUN = "run-delivery"

Spoil = Callable[[Any], list[Any]]
"""Returns the pieces that are sent instead of one. Raises ``Cut`` to end the transfer."""


class Cut(Exception):
    """The connection was lost."""


class Storage(ArtifactServiceServicer):
    """Stores artifacts in memory."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.held: dict[str, bytes] = {}

    async def PutArtifact(self, request_iterator: Any, context: Any) -> storage_pb2.PutArtifactResponse:
        data = b"".join([request.chunk async for request in request_iterator])
        content = "blake3-" + blake3(data).hexdigest()
        self.held[content] = data
        return storage_pb2.PutArtifactResponse(content_id=content, bytes=len(data))

    async def GetArtifact(self, request: storage_pb2.GetArtifactRequest, context: Any) -> AsyncIterator[Any]:
        data = self.held.get(request.content_id)
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such artifact")
            return
        for start in range(request.offset, len(data), service.CHUNK):
            piece = storage_pb2.GetArtifactResponse(chunk=data[start : start + service.CHUNK])
            for sent in await self._world.sent(piece, context):
                yield sent

    async def DeleteArtifacts(self, request: storage_pb2.DeleteArtifactsRequest, context: Any) -> Any:
        for content in request.content_ids:
            self.held.pop(content, None)
        return storage_pb2.DeleteArtifactsResponse()


class Streams(service.WeightsServer):
    """A WeightsService behind an unreliable network."""

    def __init__(self, world: World, holder: service.Holder) -> None:
        super().__init__(Identity(RUN, "learner-0", "learner", 1), holder)
        self._world = world

    async def FetchWeights(self, request: pb.FetchWeightsRequest, context: Any) -> AsyncIterator[pb.FetchWeightsResponse]:
        try:
            async for piece in super().FetchWeights(request, context):
                self._world.pieces += 1
                for sent in await self._world.sent(piece, context):
                    yield sent
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError | _Refused):
                raise
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))


class _Refused(grpc.aio.AioRpcError):
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), message)


class _Context:
    async def abort(self, code: grpc.StatusCode, message: str) -> None:
        raise _Refused(code, message)


class _Direct:
    """Stubs of both services that call them directly."""

    def __init__(self, streams: Streams, storage: Storage) -> None:
        self._streams, self._storage = streams, storage

    def FetchWeights(self, request: pb.FetchWeightsRequest, metadata: object) -> AsyncIterator[pb.FetchWeightsResponse]:
        return self._streams.FetchWeights(request, _Context())

    def GetArtifact(self, request: storage_pb2.GetArtifactRequest, metadata: object) -> AsyncIterator[Any]:
        return self._storage.GetArtifact(request, _Context())

    async def PutArtifact(self, chunks: Any, metadata: object) -> storage_pb2.PutArtifactResponse:
        return await self._storage.PutArtifact(chunks, _Context())

    async def DeleteArtifacts(self, request: Any, metadata: object, timeout: float) -> Any:
        return await self._storage.DeleteArtifacts(request, _Context())


class World:
    """One learner at address ``learner``, one storage service, one worker. ``spoil`` may change
    each transfer."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path
        self.spoil: Spoil | None = None
        self.pieces = 0
        (tmp_path / "config.json").write_text("{}")
        self.services = Services("", Token("token"))
        self.storage = Storage(self)  # pyright: ignore[reportAbstractUsage]
        self.stored = StoredWeights(RUN, tmp_path / "stored", self.services, incarnation=1)
        self.catalog = Catalog(self.stored, threads=1)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False).to(torch.bfloat16)
        self.engine = CurrentWeights(self.module)
        self.folders: dict[str, Path] = {}
        memory = tmp_path / "memory"
        memory.mkdir()
        self.cache = WeightsCache(
            RUN, str(tmp_path / "worker"), "inference-0", Fetcher(RUN, self.services), lambda run: SharedMemory(run, memory)
        )

    async def start(self) -> World:
        self.learner = await self.serve(self.catalog)
        self.services._find = self._find  # type: ignore[method-assign]
        return self

    async def _find(self, service: str, worker: tuple[str, str] | None) -> str:
        return self.learner

    async def serve(self, holder: service.Holder) -> str:
        server = grpc.aio.server()
        add_WeightsServiceServicer_to_server(Streams(self, holder), server)
        add_ArtifactServiceServicer_to_server(self.storage, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._servers.append(server)
        return address

    async def stop(self) -> None:
        await self.catalog.close()
        await self.services.close()
        for server in self._servers:
            await server.stop(0)

    @property
    def _servers(self) -> list[Any]:
        return self.__dict__.setdefault("_running", [])

    async def sent(self, piece: Any, context: Any) -> list[Any]:
        if self.spoil is None:
            return [piece]
        try:
            return self.spoil(piece)
        except Cut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was cut")
            raise

    def publish(self, version: int, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
        """Publish the current weights of the module, or the last version again; returns its
        digest."""
        if not self.folders:
            self.tensors = {name: tensor.clone() for name, tensor in named_weights(self.module)}
        change(self.tensors)
        folder = self.root / f"v{version}"
        digest = write_weights(folder, self.tensors.items(), config_source_dir=self.root, version=version, fsync=False).digest
        self.folders[digest] = folder
        self.catalog.published(version, digest, folder)
        return digest

    async def offers(self, digest: str, base: str = "", *, store: bool = False, whole: bool = False) -> list[pb.WeightsOffer]:
        """The offers as the controller completes them."""
        made = await self.catalog.offers(digest, base, whole=whole, store=store)
        for offer in made:
            if not store:
                offer.peers.append(self.learner)
        return made

    async def take(self, offers: list[pb.WeightsOffer]) -> str:
        """Load the weights as the worker does; returns their digest."""
        wanted = offers[-1].digest
        folder = await self.cache.bring(offers)
        try:
            staged = await asyncio.to_thread(self.engine.stage, folder, wanted)
            if staged != wanted:
                raise ValueError(f"staged {staged}")
        except Exception:
            await self.cache.discard(wanted)
            raise
        self.engine.load()
        return self.holds

    def connect_directly(self) -> None:
        """Call the services directly instead of through gRPC, for tests with thousands of
        transfers."""
        stub = _Direct(Streams(self, self.catalog), self.storage)
        self.services.peer = lambda address, make: stub  # type: ignore[method-assign, assignment]

        async def found(service: str, make: object) -> _Direct:
            return stub

        self.services.stub = found  # type: ignore[method-assign, assignment]

    def go_back(self, held: str, wanted: str) -> None:
        """Make the worker forget ``wanted``."""
        path = self.cache._files.pop(wanted, None)
        if path is not None:
            shutil.rmtree(path.parent)
        self.engine.stage(self.folders[held], held)
        self.engine.load()

    @property
    def holds(self) -> str:
        return weights_digest(named_weights(self.module)).root
