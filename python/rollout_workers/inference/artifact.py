"""Stores payloads that are too large for a message in the storage service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from rollout import names
from rollout.storage.v1.storage_pb2 import PutArtifactRequest
from rollout.storage.v1.storage_pb2_grpc import ArtifactServiceStub
from rollout.trajectory.v1.trajectory_pb2 import TrajectoryEnvelope
from rollout_workers.worker.discovery import Services, ServiceUnavailable, attempts

_CHUNK = 1 << 20


async def move_out(envelope: TrajectoryEnvelope, services: Services) -> None:
    """Store the payload and replace it by its content id. Retries until the storage service accepts
    it."""
    payload = envelope.payload
    run = envelope.header.key.run_id

    async def chunks() -> AsyncIterator[PutArtifactRequest]:
        for start in range(0, len(payload), _CHUNK):
            yield PutArtifactRequest(chunk=payload[start : start + _CHUNK], run_id=run if start == 0 else "")

    async for _ in attempts("the storage service does not accept a payload"):
        try:
            stub = await services.stub(names.STORAGE_SERVICE, ArtifactServiceStub)
            answer = await stub.PutArtifact(chunks(), timeout=30, metadata=services.metadata())
        except ServiceUnavailable:
            continue
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            services.forget(names.STORAGE_SERVICE)
            continue
        envelope.payload_ref = answer.content_id
        envelope.ClearField("payload")
        return
