"""WeightsService: streams weights to workers that have no access to the learner's folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import crc32c
import grpc

from rollout.weights.v1 import weights_pb2 as pb
from rollout.weights.v1.weights_pb2_grpc import WeightsServiceServicer
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.status import InvalidRequest, RunMismatch

SERVICE = pb.DESCRIPTOR.services_by_name["WeightsService"].full_name
CHUNK = 1 << 20


class Holder(Protocol):
    """A source of weights: the learner has those that it published, an inference worker those that
    it received."""

    def find(self, digest: str, form: int, base_digest: str) -> memoryview:
        """The bytes of a form of a version; they stay valid while they are referenced. Raises
        ``VersionNotFound``."""
        ...


class WeightsServer(WeightsServiceServicer):
    """The servicer. ``worker.serving`` authenticates and validates requests."""

    def __init__(self, who: Identity, holder: Holder) -> None:
        self._who, self._holder = who, holder

    async def FetchWeights(
        self, request: pb.FetchWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FetchWeightsResponse]:
        if request.run_id != self._who.run:
            raise RunMismatch(
                f"this worker has weights of run {self._who.run}, not of {request.run_id}", metadata={"run": self._who.run}
            )
        data = await asyncio.to_thread(self._holder.find, request.digest, request.form, request.base_digest)
        if request.offset > len(data):
            problem = f"{request.offset} is beyond the {len(data)} bytes of the version"
            raise InvalidRequest(problem, violations=[("offset", problem)])
        for start in range(request.offset, len(data), CHUNK):
            yield await asyncio.to_thread(_chunk, data, start)


def _chunk(data: memoryview, start: int) -> pb.FetchWeightsResponse:
    chunk = bytes(data[start : start + CHUNK])
    return pb.FetchWeightsResponse(offset=start, chunk=chunk, crc32c=crc32c.crc32c(chunk), total_bytes=len(data))
