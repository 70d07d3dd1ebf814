"""The policy of a worker as an engine: what the parts of an inference worker that deliver, verify,
and pause ask of it. It decodes no tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

import torch
from torch import nn

from rollout_workers.engines.base import (
    EngineStats,
    GroupRequest,
    Ids,
    PromptLogprobs,
    SampleDelta,
    SampleOutput,
    WeightsSource,
)
from rollout_workers.engines.errors import NothingStaged
from rollout_workers.engines.staging import Staging
from rollout_workers.weights import named_weights, weights_digest
from rollout_workers.worker.status import EdgeError

T = TypeVar("T")


class NoLanguageModel(EdgeError):
    """The run trains a policy that acts in environments, which answers no prompts."""

    reason: ClassVar[str] = "NO_LANGUAGE_MODEL"

    def __init__(self) -> None:
        super().__init__(
            "this run trains a policy that acts in environments, which answers no prompts",
            fix="see its episodes with `rollout completions`",
        )


class PolicyEngine:
    """An ``Engine`` around the module of a policy. Methods belong to one event loop, except
    ``stats`` and ``progress``."""

    def __init__(self, module: nn.Module, *, version: int, slots: int) -> None:
        """slots: environments that the policy acts in at once."""
        self.module = module
        self.version, self.slots = version, slots
        self.counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Counts the episodes that are played, and that wait for an environment; of their player.
        Thread-safe."""
        self.played = 0
        """Steps of all environments."""
        self._staging = Staging(dict(named_weights(module)))
        self._epoch = self._calls = 0
        self._busy = 0.0
        self._acting = False
        self._free = asyncio.Event()
        self._free.set()
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")

    async def act(self, choose: Callable[[], T]) -> tuple[T, int]:
        """Call ``choose`` in the policy's thread, with weights that do not change, and return its
        result with their version. Waits while the engine is paused."""
        while True:
            await self._free.wait()
            async with self._lock:
                if not self._free.is_set():
                    continue
                began = time.monotonic()
                self._acting = True
                try:
                    result = await asyncio.get_running_loop().run_in_executor(self._thread, choose)
                finally:
                    self._acting = False
                self._busy += time.monotonic() - began
                self._calls += 1
                return result, self.version

    async def pause(self) -> None:
        self._free.clear()
        async with self._lock:  # until the policy has chosen
            return

    async def resume(self) -> None:
        self._free.set()

    async def offload(self) -> None:
        await self.pause()

    async def onload(self) -> None:
        await self.resume()

    async def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        return ()

    async def stage_weights(self, source: WeightsSource, expected: str | None = None) -> str:
        return await asyncio.to_thread(self._staging.stage, source, expected)

    async def swap_weights(self, version: int) -> None:
        async with self._lock:
            if not self._staging:
                if version == self.version:
                    return
                raise NothingStaged(f"no weights are staged for version {version}")
            await asyncio.to_thread(self._load)
            self.version = version
            self._epoch += 1

    @torch.no_grad()
    def _load(self) -> None:
        staged = self._staging.take()
        for name, tensor in named_weights(self.module):
            tensor.copy_(staged[name])

    async def weights_digest(self) -> str:
        async with self._lock:
            return (await asyncio.to_thread(weights_digest, named_weights(self.module))).root

    def progress(self) -> int | None:
        """A number that changes with each call of the policy; None while none is computed, for
        example during a step of the environments, which has its own limit. Thread-safe."""
        return self._calls if self._acting else None

    def stats(self) -> EngineStats:
        active, queued = self.counts()
        return EngineStats(
            slots=self.slots,
            active=active,
            queued=queued,
            paused=not self._free.is_set(),
            version=self.version,
            cache_epoch=self._epoch,
            generated_tokens=self.played,
            prompt_tokens=0,
            steps=self._calls,
            busy_seconds=self._busy,
            forward_seconds=self._busy,
            tokens_per_second=0.0,
        )

    async def shutdown(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def generate(self, batch: Sequence[GroupRequest]) -> AsyncIterator[SampleDelta | SampleOutput]:
        raise NoLanguageModel

    async def prompt_logprobs(self, prompt_ids: Ids, top: int = 0) -> PromptLogprobs:
        raise NoLanguageModel
