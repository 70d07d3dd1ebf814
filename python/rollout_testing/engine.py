"""An engine without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from rollout_workers.engines.base import (
    EngineStats,
    GroupRequest,
    Ids,
    PromptLogprobs,
    SampleDelta,
    SampleOutput,
    TopLogprobs,
    VersionSpan,
    WeightsSource,
)

Answer = Callable[[GroupRequest, int], Sequence[int]]
"""(request, sample) -> token ids."""


class ScriptedEngine:
    """Implements ``Engine``: answers at once with what ``answer`` says, under whatever version was
    swapped in.

    ``gate``: nothing is answered while it is cleared. ``digests``: what a staged folder hashes to,
    by its path.
    ``held``: what the read-back gives; ``swap_weights`` sets it, a test may spoil it.
    """

    def __init__(self, answer: Answer, *, version: int = 0, digest: str = "blake3-" + "0" * 64) -> None:
        self._answer = answer
        self._staged = digest
        self._cache_epoch = 0
        self.version = version
        self.held = digest
        self.digests: dict[str, str] = {}
        self.requests: list[GroupRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.aborted: list[str] = []

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncIterator[SampleDelta | SampleOutput]:
        self.requests.extend(batch)
        await self.gate.wait()
        for request in batch:
            for sample in range(len(request.seeds)):
                ids = np.array(self._answer(request, sample), np.int32)
                yield SampleOutput(
                    request_id=request.request_id,
                    sample=sample,
                    token_ids=ids,
                    logprobs=np.full(len(ids), -0.5, np.float32),
                    raw_logprobs=np.full(len(ids), -0.25, np.float32),
                    version_spans=(VersionSpan(self.version, 0, len(ids)),),
                    finish_reason="aborted" if request.request_id in self.aborted else "stop",
                )

    async def prompt_logprobs(self, prompt_ids: Ids, top: int = 0) -> PromptLogprobs:
        """-0.75 of each token but the first, and the same of the first ids of the vocabulary."""
        await self.gate.wait()
        found = np.full(len(prompt_ids), -0.75, np.float32)
        found[:1] = 0
        best = TopLogprobs(
            np.tile(np.arange(top, dtype=np.int32), (len(found), 1)), np.full((len(found), top), -0.75, np.float32)
        )
        best.token_ids[:1], best.logprobs[:1] = -1, 0
        return PromptLogprobs(found, best if top else None)

    async def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        self.aborted.extend(request_ids)
        return tuple(request_ids)

    async def pause(self) -> None:
        self.gate.clear()

    async def resume(self) -> None:
        self.gate.set()

    async def offload(self) -> None:
        pass

    async def onload(self) -> None:
        pass

    async def stage_weights(self, source: WeightsSource, expected: str | None = None) -> str:
        self._staged = self.digests[str(source)]
        return self._staged

    async def swap_weights(self, version: int) -> None:
        self.version, self.held = version, self._staged
        self._cache_epoch += 1

    async def weights_digest(self) -> str:
        return self.held

    def stats(self) -> EngineStats:
        return EngineStats(
            slots=64,
            active=0,
            queued=0,
            paused=not self.gate.is_set(),
            version=self.version,
            cache_epoch=self._cache_epoch,
            generated_tokens=0,
            prompt_tokens=0,
            steps=0,
            tokens_per_second=0.0,
            busy_seconds=0.0,
            forward_seconds=0.0,
        )

    async def shutdown(self) -> None:
        pass
