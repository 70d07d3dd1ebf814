"""Swaps the engine's weights and keeps receipts: digests that were verified as ``weights.verify``
says, by default by reading the tensors in the engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.errors import RolloutError
from rollout.weights.v1.weights_pb2 import WeightsReceipt
from rollout_workers.engines.base import Engine, SampledWeights, WeightsSource
from rollout_workers.engines.errors import WeightsMismatch
from rollout_workers.weights.transfer.cache import ADAPTER_FILE
from rollout_workers.worker.status import EdgeError

if TYPE_CHECKING:
    from torch import Tensor

_MOST_RECEIPTS = 128
_SAMPLE_BYTES = 64 << 20
"""Bytes of the tensors that ``sampled`` verification reads of a version, about 0.02 s of
hashing."""


@dataclass(frozen=True, slots=True)
class Verification:
    """How receipts are verified. mode: of ``weights.verify``. every_steps: with ``sampled``, all
    tensors of these versions are read, those with a snapshot; 0: of none."""

    mode: Literal["full", "sampled", "none"] = "full"
    every_steps: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> Verification:
        """That of a run."""
        return cls(cast(Literal["full", "sampled", "none"], config.weights.verify or "full"), config.snapshot.every_steps)

    def of_version(self, version: int) -> Literal["full", "sampled", "none"]:
        """The mode for one version."""
        whole = self.mode == "sampled" and self.every_steps and version % self.every_steps == 0
        return "full" if whole else self.mode


FULL = Verification()


class WeightsDigestMismatch(RolloutError):
    """The digest of the weights' tensors differs from the expected one."""

    reason: ClassVar[str] = "WEIGHTS_DIGEST_MISMATCH"

    def __init__(self, version: int, expected: str, got: str, *, current: bool) -> None:
        """current: the engine uses the wrong weights, so the worker can't continue; else they were
        only staged, and the old version stays in use."""
        where = "the engine has" if current else "the folder contains"
        super().__init__(
            f"weights version {version} must have the digest {expected}, but {where} {got}",
            fix="the worker exits and is restarted" if current else "the old version stays in use; load this version again",
        )
        self.metadata = {"version": str(version), "expected": expected, "got": got, "current": str(current).lower()}


class WeightsNotStaged(EdgeError):
    """``commit`` was called for weights that are not staged."""

    reason: ClassVar[str] = "WEIGHTS_NOT_STAGED"


class EngineReceipts:
    """The receipts of the current version of the weights and of earlier ones."""

    def __init__(
        self,
        engine: Engine,
        merge: Callable[[Path], Mapping[str, Tensor]] | None = None,
        verification: Verification = FULL,
    ) -> None:
        """merge: merges a folder of adapters into full weights; None if the run does not train
        adapters."""
        self._engine, self._merge, self._verification = engine, merge, verification
        self._receipts: dict[int, WeightsReceipt] = {}
        self._reading: asyncio.Task[WeightsReceipt] | None = None
        self._staged: tuple[int, str] | None = None  # version and digest
        self._swapping = asyncio.Lock()  # taken by swaps and verifications
        self.current = WeightsReceipt()
        self.version = 0
        """The version that the engine samples with. Its receipt may not be computed yet
        (``settled``)."""
        self.changed = asyncio.Event()
        """Set when the engine uses a new version."""

    def of(self, version: int | None) -> WeightsReceipt:
        """The receipt of a version; of the current one if ``version`` is None or its receipt is
        gone."""
        return self.current if version is None else self._receipts.get(version, self.current)

    def digest(self, version: int) -> str:
        """The digest that the engine computed for a version; empty if its receipt is gone."""
        receipt = self.of(version)
        return receipt.digest if receipt.version == version else ""

    def remember(self, version: int, digest: str) -> None:
        """Store the digest that another worker's engine computed for a version that sampled a part
        of an episode. Does nothing for a version that this engine has used."""
        if version not in self._receipts and version != self.current.version:
            self._receipts[version] = WeightsReceipt(version=version, digest=digest)

    def has(self, version: int, digest: str) -> bool:
        """Whether the engine uses this version with this digest, according to its receipt."""
        return self.current.version == version and self.current.digest == digest

    async def settled(self) -> None:
        """Wait for the receipt of the weights that the engine samples with. Raises
        :class:`CurrentWeightsMismatch` if they differ from the requested weights; their samples
        must not be published."""
        if self._reading is not None:
            await asyncio.shield(self._reading)

    async def read_back(self) -> WeightsReceipt:
        """Compute the digest of the engine's first weights and store the receipt. Without
        verification nothing is sampled before the first ``load``."""
        if self._verification.mode == "none":
            self.version = -1
            stats = self._engine.stats()
            self.current = WeightsReceipt(version=stats.version, cache_epoch=stats.cache_epoch, verify="none")
            return self.current
        return self._store(await self._engine.weights_digest(), "full")

    def _store(self, digest: str, mode: str) -> WeightsReceipt:
        """Store the receipt of the engine's current weights."""
        stats = self._engine.stats()
        self.current = WeightsReceipt(version=stats.version, digest=digest, cache_epoch=stats.cache_epoch, verify=mode)
        self._receipts.pop(stats.version, None)
        self._receipts[stats.version] = self.current
        while len(self._receipts) > _MOST_RECEIPTS:
            del self._receipts[next(iter(self._receipts))]
        self.version = stats.version
        self.changed.set()
        return self.current

    async def stage(self, version: int, digest: str, directory: str) -> None:
        """Read the weights and verify them, for ``commit``. The current version stays in use.

        Raises ``EngineError``, ``WeightsUnreadable``, :class:`WeightsDigestMismatch`.
        """
        if self._staged == (version, digest):
            return
        self._staged = None
        try:
            source: WeightsSource = directory
            if self._merge is not None and (Path(directory) / ADAPTER_FILE).is_file():
                source = await asyncio.to_thread(self._merge, Path(directory))
            staged = await self._engine.stage_weights(source, digest)
        except WeightsMismatch as error:
            raise WeightsDigestMismatch(
                version, f"{digest} ({error.tensor}: {error.expected})", error.got, current=False
            ) from error
        if staged != digest:
            raise WeightsDigestMismatch(version, digest, staged, current=False)
        self._staged = (version, digest)

    async def commit(self, version: int, digest: str) -> WeightsReceipt:
        """Swap the staged weights in, and compute their receipt. Sampling may start with the swap,
        before the receipt is computed.

        Raises ``EngineError``, :class:`WeightsNotStaged`, :class:`CurrentWeightsMismatch`.
        """
        if self.has(version, digest):
            return self.current
        if self._staged != (version, digest):
            raise WeightsNotStaged(
                f"weights version {version} is not staged", fix="call StageWeights first", metadata={"version": str(version)}
            )
        stats = self._engine.stats()
        if self.version == version and (stats.active or stats.queued):
            # The learner made a step twice with different results. Samples in progress would mix
            # both under one receipt.
            raise CurrentWeightsMismatch(version, digest, self.current.digest)
        self._staged = None
        self._reading = asyncio.create_task(self._swap(version, digest), name="swap")
        return await asyncio.shield(self._reading)  # the swap continues if the caller is cancelled

    async def load(self, version: int, digest: str, directory: str) -> WeightsReceipt:
        """``stage`` and ``commit``."""
        if not self.has(version, digest):
            await self.stage(version, digest, directory)
        return await self.commit(version, digest)

    @property
    def staged(self) -> int | None:
        """The version that waits for ``commit``."""
        return self._staged[0] if self._staged else None

    async def _swap(self, version: int, digest: str) -> WeightsReceipt:
        async with self._swapping:
            await self._engine.swap_weights(version)
            self.version = version
            self.changed.set()
            mode = self._verification.of_version(version)
            if mode == "full":
                receipt = self._store(await self._engine.weights_digest(), mode)
            else:
                if mode == "sampled":
                    await self._check(version, digest)
                receipt = self._store(digest, mode)
        if receipt.digest != digest:
            raise CurrentWeightsMismatch(version, digest, receipt.digest)
        return receipt

    async def verify(self) -> None:
        """Compare the engine's weights with the receipt, all of them or random ones, as receipts
        are verified. Raises :class:`CurrentWeightsMismatch`."""
        async with self._swapping:
            expected = self.current
            if self._verification.mode == "sampled":
                await self._check(expected.version, expected.digest)
            elif self._verification.mode == "full" and (got := await self._engine.weights_digest()) != expected.digest:
                raise CurrentWeightsMismatch(expected.version, expected.digest, got)

    async def _check(self, version: int, digest: str) -> None:
        """Compare random tensors of the engine with those that were loaded."""
        if wrong := await cast(SampledWeights, self._engine).check_weights(secrets.randbits(32), _SAMPLE_BYTES):
            raise CurrentWeightsMismatch(version, digest, f"another tensor {wrong}")


class CurrentWeightsMismatch(WeightsDigestMismatch):
    """The engine uses weights that differ from its receipt. The worker must be fenced."""

    def __init__(self, version: int, expected: str, got: str) -> None:
        super().__init__(version, expected, got, current=True)
