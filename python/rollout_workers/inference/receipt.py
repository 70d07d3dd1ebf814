"""What the engine says of the weights that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rollout.errors import RolloutError
from rollout.weights.v1.weights_pb2 import WeightsReceipt
from rollout_workers.engines.base import Engine, WeightsSource
from rollout_workers.engines.errors import WeightsMismatch
from rollout_workers.weights.transfer.cache import ADAPTER_FILE

if TYPE_CHECKING:
    from torch import Tensor

_REMEMBERED = 128


class WeightsDigestMismatch(RolloutError):
    """The digest of the weights' tensors differs from the expected one."""

    reason: ClassVar[str] = "WEIGHTS_DIGEST_MISMATCH"

    def __init__(self, version: int, expected: str, got: str, *, held: bool) -> None:
        """held: the engine uses the weights, so it can't continue; else they were only staged."""
        where = "the engine holds" if held else "the folder gives"
        super().__init__(
            f"weights version {version} should be {expected}, {where} {got}",
            fix="the worker leaves and is started again" if held else "the old version stays; deliver this version again",
        )
        self.metadata = {"version": str(version), "expected": expected, "got": got, "held": str(held).lower()}


class Holdings:
    """Receipts by version: of the weights that are held now, and of the last ones before."""

    def __init__(self, engine: Engine, merge: Callable[[Path], Mapping[str, Tensor]] | None = None) -> None:
        """merge: makes whole weights of a folder that holds adapters alone; None where the run
        trains none."""
        self._engine, self._merge = engine, merge
        self._receipts: dict[int, WeightsReceipt] = {}
        self._reading: asyncio.Task[WeightsReceipt] | None = None
        self._turn = asyncio.Lock()  # swap and read back, or verify
        self.current = WeightsReceipt()
        self.version = 0
        """Version that the engine samples with; its receipt follows (``settled``)."""
        self.changed = asyncio.Event()
        """Set whenever the engine has taken over a version."""

    def of(self, version: int | None) -> WeightsReceipt:
        """The receipt of the weights that sampled a token; of the current ones where nothing is
        known."""
        return self.current if version is None else self._receipts.get(version, self.current)

    def holds(self, version: int, digest: str) -> bool:
        """Whether the engine holds a version, by what was read back."""
        return self.current.version == version and self.current.digest == digest

    async def settled(self) -> None:
        """Return when what the engine samples with has its receipt. Raises
        :class:`HeldWeightsMismatch` where it holds other tensors than it was sent: nothing that
        they sampled may leave."""
        if self._reading is not None:
            await asyncio.shield(self._reading)

    async def read_back(self) -> WeightsReceipt:
        """Digest what the engine holds now and remember it."""
        digest = await self._engine.weights_digest()
        stats = self._engine.stats()
        self.current = WeightsReceipt(version=stats.version, digest=digest, cache_epoch=stats.cache_epoch)
        self._receipts.pop(stats.version, None)
        self._receipts[stats.version] = self.current
        while len(self._receipts) > _REMEMBERED:
            del self._receipts[next(iter(self._receipts))]
        self.version = stats.version
        self.changed.set()
        return self.current

    async def take_over(self, version: int, digest: str, directory: str) -> WeightsReceipt:
        """Stage, verify, swap, read back. Raises :class:`WeightsDigestMismatch`, ``EngineError``,
        ``WeightsUnreadable``.

        Sampling may begin with the swap, while the tensors are read back. Unless the mismatch is
        ``held`` the old version stays in use.
        """
        if self.holds(version, digest):
            return self.current
        stats = self._engine.stats()
        if self.version == version and (stats.active or stats.queued):
            # A step was made twice, not to the same bits. A sample in flight would mix the two
            # under one receipt.
            raise HeldWeightsMismatch(version, digest, self.current.digest)
        try:
            source: WeightsSource = directory
            if self._merge is not None and (Path(directory) / ADAPTER_FILE).is_file():
                source = await asyncio.to_thread(self._merge, Path(directory))
            staged = await self._engine.stage_weights(source, digest)
        except WeightsMismatch as error:
            raise WeightsDigestMismatch(version, f"{digest} ({error.tensor}: {error.expected})", error.got, held=False) from error
        if staged != digest:
            raise WeightsDigestMismatch(version, digest, staged, held=False)
        self._reading = asyncio.create_task(self._swap(version, digest), name="swap")
        return await asyncio.shield(self._reading)  # it continues after the caller is cancelled

    async def _swap(self, version: int, digest: str) -> WeightsReceipt:
        async with self._turn:
            await self._engine.swap_weights(version)
            self.version = version
            self.changed.set()
            receipt = await self.read_back()
        if receipt.digest != digest:
            raise HeldWeightsMismatch(version, digest, receipt.digest)
        return receipt

    async def verify(self) -> None:
        """Digest what the engine holds and compare it with the receipt. Raises
        :class:`HeldWeightsMismatch`."""
        async with self._turn:
            expected = self.current
            got = await self._engine.weights_digest()
        if got != expected.digest:
            raise HeldWeightsMismatch(expected.version, expected.digest, got)


class HeldWeightsMismatch(WeightsDigestMismatch):
    """The engine holds tensors that are not what its receipt says. The worker must be fenced."""

    def __init__(self, version: int, expected: str, got: str) -> None:
        super().__init__(version, expected, got, held=True)
