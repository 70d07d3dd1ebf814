"""Updates of the weights of an inference worker in two phases: stage a version, then commit it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import nullcontext

from rollout.weights.v1.weights_pb2 import WeightsManifest, WeightsOffer, WeightsReceipt
from rollout_workers.engines.base import Engine
from rollout_workers.inference.admission import Admission
from rollout_workers.inference.puller import Puller
from rollout_workers.inference.receipt import CurrentWeightsMismatch, EngineReceipts, WeightsDigestMismatch
from rollout_workers.weights.transfer.cache import WeightsCache, described
from rollout_workers.worker.lifecycle import Lifecycle

log = logging.getLogger(__name__)

INVALID_WEIGHTS_SECONDS = 5.0
"""How long a worker waits for valid weights after it received invalid ones. Then it is fenced."""


class WeightsUpdates:
    """Stages and commits versions, one at a time, and fences a worker whose weights are wrong."""

    def __init__(
        self, receipts: EngineReceipts, cache: WeightsCache, lifecycle: Lifecycle, admission: Admission | None = None
    ) -> None:
        """admission: of the engine; None: a commit does not wait for requests, so ``drain`` has no
        effect."""
        self._receipts, self._cache, self._lifecycle, self._admission = receipts, cache, lifecycle, admission
        self._lock = asyncio.Lock()
        self._folder = ""  # of the staged version
        self._fencing: asyncio.TimerHandle | None = None

    @property
    def draining(self) -> bool:
        """Whether a commit waits for the running requests."""
        return self._admission is not None and self._admission.closed

    async def stage(self, weights: WeightsManifest, offers: Sequence[WeightsOffer]) -> None:
        """Get a version from its folder or the offers, verify it, and keep it for ``commit``.

        Raises the errors of ``WeightsCache.bring`` and ``EngineReceipts.stage``.
        """
        async with self._lock:
            await self._stage(weights, offers)

    async def commit(self, version: int, digest: str, *, drain: bool = False) -> WeightsReceipt:
        """Swap the staged version in. drain: after the running requests. Raises the errors of
        ``EngineReceipts.commit``."""
        async with self._lock, self._admission.drained() if drain and self._admission else nullcontext():
            return await self._commit(version, digest)

    async def load(self, weights: WeightsManifest, offers: Sequence[WeightsOffer]) -> WeightsReceipt:
        """Both phases."""
        async with self._lock:
            await self._stage(weights, offers)
            return await self._commit(weights.version, weights.digest)

    async def _stage(self, weights: WeightsManifest, offers: Sequence[WeightsOffer]) -> None:
        if self._receipts.has(weights.version, weights.digest):
            return
        self._folder = weights.directory
        if offers:
            self._cancel_fence()  # the weights that are being fetched may be valid
            self._folder = await self._cache.bring(offers)
            log.info("received weights version %d over the network: %s", weights.version, described(offers))
        try:
            await self._receipts.stage(weights.version, weights.digest, self._folder)
        except WeightsDigestMismatch as error:
            await self._cache.discard(weights.digest)
            self._fence_later(str(error))
            raise
        self._cancel_fence()

    async def _commit(self, version: int, digest: str) -> WeightsReceipt:
        if self._receipts.has(version, digest):
            return self._receipts.current
        try:
            receipt = await self._receipts.commit(version, digest)
        except CurrentWeightsMismatch as error:
            self._lifecycle.fence(str(error))
            raise
        self._cache.note(digest, self._folder)
        return receipt

    def _fence_later(self, reason: str) -> None:
        """Fence the worker after ``INVALID_WEIGHTS_SECONDS`` unless valid weights arrive. Until
        then the old version serves requests."""
        if self._fencing is None:
            loop = asyncio.get_running_loop()
            self._fencing = loop.call_later(INVALID_WEIGHTS_SECONDS, self._lifecycle.fence, reason)

    def _cancel_fence(self) -> None:
        if self._fencing is not None:
            self._fencing.cancel()
            self._fencing = None


class Pauses:
    """Pauses an engine, at most for a time that the caller names, and gives the groups that it has
    not started to other workers."""

    def __init__(self, engine: Engine, puller: Puller) -> None:
        self._engine, self._puller = engine, puller
        self._end: asyncio.TimerHandle | None = None
        self._resuming: asyncio.Task[None] | None = None

    async def pause(self, most_seconds: int) -> None:
        """Pause until ``resume``, or until ``most_seconds`` have passed; 0: without limit."""
        self._cancel()
        if most_seconds:
            self._end = asyncio.get_running_loop().call_later(most_seconds, self._expire, most_seconds)
        await self._puller.pause()
        await self._engine.pause()

    async def resume(self) -> None:
        """Continue decoding."""
        self._cancel()
        await self._engine.resume()
        self._puller.resume()

    def _cancel(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _expire(self, seconds: int) -> None:
        log.warning("no caller resumed the engine within %d s; it resumes by itself", seconds)
        self._resuming = asyncio.create_task(self.resume(), name="resume")
