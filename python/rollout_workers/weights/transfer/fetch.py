"""Downloads the bytes of an offer from other workers or the storage service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

import crc32c
import grpc

from rollout import names
from rollout.storage.v1.storage_pb2 import GetArtifactRequest
from rollout.storage.v1.storage_pb2_grpc import ArtifactServiceStub
from rollout.weights.v1 import weights_pb2 as pb
from rollout.weights.v1.weights_pb2_grpc import WeightsServiceStub
from rollout_workers.weights.transfer.artifacts import PREAMBLE
from rollout_workers.weights.transfer.errors import SourcesLost
from rollout_workers.worker.discovery import Services, ServiceUnavailable

log = logging.getLogger(__name__)

_ROUNDS = 2  # how often all sources may fail in a row before a transfer is given up
_PAUSE_SECONDS = 0.05
_SILENCE_SECONDS = 30.0

Pieces = AsyncIterator[tuple[int, bytes]]
"""The offset of a piece, and its bytes."""


class Broken(Exception):
    """A piece that is not what was sent, or is not the next one; or the end came too soon."""


class Fetcher:
    """Fetches for one run. Sources are tried in order; each resumes where the previous one
    stopped."""

    def __init__(self, run: str, services: Services) -> None:
        self._run, self._services = run, services

    async def fetch(self, offer: pb.WeightsOffer, path: Path) -> None:
        """Return when ``path`` has the offer's bytes. Bytes that it has already are not fetched
        again.

        Each piece has a checksum; the caller must verify the weights digest of the result. Raises
        :class:`SourcesLost`.
        """
        sources: list[tuple[str, Callable[[int], Pieces]]] = [
            (peer, lambda offset, peer=peer: self._stream(peer, offer, offset)) for peer in offer.peers
        ]
        if offer.content_id:
            sources.append(("storage", lambda offset: self._stored(offer, offset)))
        failures = turn = 0
        last = "no source was named"
        with open(path, "ab") as file:
            if file.tell() > offer.bytes:
                file.truncate(0)
            while (at := file.tell()) < offer.bytes:
                if failures >= _ROUNDS * len(sources):
                    raise SourcesLost(
                        f"weights {offer.version}: received {at} of {offer.bytes} bytes, then no source sent more ({last})",
                        fix="the transfer is retried; check the network between the learner and the workers",
                    )
                name, pieces = sources[turn % len(sources)]
                try:
                    await _receive(pieces(at), file, offer.bytes)
                except (grpc.aio.AioRpcError, ServiceUnavailable, Broken) as error:
                    last = f"{name}: {_told(error)}"
                    log.info("weights version %d at byte %d of %d: %s", offer.version, file.tell(), offer.bytes, last)
                    turn += 1
                    failures = 0 if file.tell() > at else failures + 1
                    await asyncio.sleep(_PAUSE_SECONDS * min(failures, 20))

    async def _stream(self, peer: str, offer: pb.WeightsOffer, offset: int) -> Pieces:
        request = pb.FetchWeightsRequest(
            run_id=self._run, digest=offer.digest, form=offer.form, base_digest=offer.base_digest, offset=offset
        )
        stub = self._services.peer(peer, WeightsServiceStub)
        async for piece in stub.FetchWeights(request, metadata=self._services.peer_metadata()):
            if piece.total_bytes != offer.bytes:
                raise Broken(f"has {piece.total_bytes} bytes of the version, but {offer.bytes} were offered")
            if crc32c.crc32c(piece.chunk) != piece.crc32c:
                raise Broken(f"the piece at byte {piece.offset} does not match its checksum")
            yield piece.offset, piece.chunk

    async def _stored(self, offer: pb.WeightsOffer, offset: int) -> Pieces:
        stub = await self._services.stub(names.STORAGE_SERVICE, ArtifactServiceStub)
        at = PREAMBLE + offset if offset else 0  # an artifact that is read from its start is verified by the storage service
        request = GetArtifactRequest(content_id=offer.content_id, offset=at)
        try:
            async for piece in stub.GetArtifact(request, metadata=self._services.metadata()):
                start = max(at, PREAMBLE)
                yield start - PREAMBLE, piece.chunk[start - at :]
                at += len(piece.chunk)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._services.forget(names.STORAGE_SERVICE)
            raise


async def _receive(pieces: Pieces, file: BinaryIO, wanted: int) -> None:
    """Append the pieces. Raises :class:`Broken` if one is missing or superfluous."""
    while True:
        try:
            async with asyncio.timeout(_SILENCE_SECONDS):  # the stream from a host that vanished does not end by itself
                offset, data = await anext(pieces)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise Broken(f"received nothing for {_SILENCE_SECONDS:g} s") from None
        at = file.tell()
        if offset != at:
            raise Broken(f"received byte {offset} instead of byte {at}")
        if at + len(data) > wanted:
            raise Broken(f"received {at + len(data)} bytes, but {wanted} were offered")
        await asyncio.to_thread(_append, file, data)
    if file.tell() < wanted:
        raise Broken(f"the stream ended after {file.tell()} bytes")


def _append(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()


def _told(error: BaseException) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
