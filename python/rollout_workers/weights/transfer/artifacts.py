"""Weights in the storage service: one artifact per version and form; older ones are removed.

Storage names an artifact by its content, and a snapshot may contain the same file of tensors. A
preamble of 256 bytes with the run and the digest makes each artifact unique, so that it can be
removed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from rollout import names
from rollout.fence.v1.fence_pb2 import Fence
from rollout.storage.v1.storage_pb2 import DeleteArtifactsRequest, PutArtifactRequest
from rollout.storage.v1.storage_pb2_grpc import ArtifactServiceStub
from rollout_workers.worker.discovery import Services, ServiceUnavailable, call

log = logging.getLogger(__name__)

PREAMBLE = 256
_CHUNK = 1 << 20
_KEPT = 16  # artifacts: some versions, whole and as patches


class StoredWeights:
    """The artifacts of a run's learner. Their list is stored in the file ``ledger``, so that the
    next process can remove them."""

    def __init__(self, run: str, ledger: Path, services: Services, incarnation: int) -> None:
        """incarnation: of the run. The storage service refuses the learner once one of a later
        incarnation has stored weights."""
        self._run, self._ledger, self._services = run, ledger, services
        self._fence = Fence(incarnation=incarnation, role=names.worker_service("learner"))
        self._names: dict[str, str] = {}
        self._kept: list[str] = ledger.read_text().split() if ledger.is_file() else []

    async def put(self, name: str, data: memoryview) -> str:
        """Store bytes once per name. Returns their content id. Raises gRPC errors,
        ``ServiceUnavailable``."""
        known = self._names.get(name)
        if known is not None:
            return known
        preamble = f"rollout.weights.v1\n{self._run}\n{name}\n".encode().ljust(PREAMBLE, b"\0")
        if len(preamble) > PREAMBLE:
            raise ValueError(f"the name {name} is too long")
        stub = await self._services.stub(names.STORAGE_SERVICE, ArtifactServiceStub)

        async def chunks() -> AsyncIterator[PutArtifactRequest]:
            yield PutArtifactRequest(chunk=preamble, run_id=self._run, fence=self._fence)
            for start in range(0, len(data), _CHUNK):
                yield PutArtifactRequest(chunk=bytes(data[start : start + _CHUNK]))

        try:
            answer = await stub.PutArtifact(chunks(), metadata=self._services.metadata())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._services.forget(names.STORAGE_SERVICE)
            raise
        self._names[name] = answer.content_id
        self._kept = [content for content in self._kept if content != answer.content_id] + [answer.content_id]
        await self._remove(self._kept[:-_KEPT])
        return answer.content_id

    async def close(self) -> None:
        """Remove all artifacts."""
        with contextlib.suppress(grpc.aio.AioRpcError, ServiceUnavailable):
            await self._remove(list(self._kept))

    async def _remove(self, contents: list[str]) -> None:
        """Remove an artifact. If that fails, it stays in the ledger."""
        try:
            if contents:
                request = DeleteArtifactsRequest(content_ids=contents, run_id=self._run, fence=self._fence)
                await call(self._services, names.STORAGE_SERVICE, ArtifactServiceStub, "DeleteArtifacts", request, tries=1)
                gone = set(contents)
                self._kept = [content for content in self._kept if content not in gone]
                self._names = {name: content for name, content in self._names.items() if content not in gone}
        except (grpc.aio.AioRpcError, ServiceUnavailable) as error:
            log.info("can't remove old weights from the storage service, retrying later: %s", error)
        finally:
            if self._kept:
                self._ledger.parent.mkdir(parents=True, exist_ok=True)
                self._ledger.write_text("\n".join(self._kept))
            else:
                self._ledger.unlink(missing_ok=True)
