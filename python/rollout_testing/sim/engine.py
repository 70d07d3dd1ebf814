"""An engine without a model. Its samples are hashes of weights, prompt, and seed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollout_testing.sim import policy
from rollout_testing.sim.hang import hangs
from rollout_testing.sim.journal import Journal
from rollout_workers.data.prompts import Text
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
from rollout_workers.engines.errors import DuplicateRequest, EngineClosed, NothingStaged
from rollout_workers.engines.registry import Capabilities

CAPABILITIES = Capabilities(prompt_logprobs=True, greedy=False, deterministic=True, continues=True)
"""Temperature and filters are ignored, a sample is drawn at once, and one logprob per token is
reported."""


class SimEngine:
    """Implements ``Engine``. seconds: the longest duration of a sample; the seed determines the
    duration of each, so that groups end at different times. began: called with the start of a group
    (``time.time`` seconds)."""

    def __init__(
        self,
        folder: str,
        version: int,
        slots: int,
        seconds: float = 0.0,
        began: Journal | None = None,
    ) -> None:
        self.words = policy.read(folder)
        self._staged: policy.Words | None = None
        self._began = began
        self._version, self._slots, self._seconds = version, slots, seconds
        self._epoch = self._samples = self._prompts = 0
        self._running: dict[str, bool] = {}  # request -> aborted
        self._gate = asyncio.Event()
        self._gate.set()
        self._closed = self._hangs = False

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncIterator[SampleDelta | SampleOutput]:
        if self._closed:
            raise EngineClosed("the engine was shut down")
        if any(request.request_id in self._running for request in batch):
            raise DuplicateRequest("a request with this id is still being sampled")
        self._running |= {request.request_id: False for request in batch}
        try:
            for request in batch:
                if self._began is not None:
                    self._began.write(request=request.request_id, at=time.time())
                for sample in range(len(request.seeds)):
                    yield await self._sample(request, sample)
        finally:
            for request in batch:
                self._running.pop(request.request_id, None)

    async def _sample(self, request: GroupRequest, sample: int) -> SampleOutput:
        seed = request.seeds[sample]
        self._hangs = self._hangs or hangs("engine")
        if self._hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(self._seconds * (seed % 256) / 256)
        await self._gate.wait()
        aborted = self._running[request.request_id]
        most = 1 if aborted else request.params.max_tokens
        ids, logprobs = policy.sample(self.words, np.asarray(request.prompt_ids).tolist(), seed, most)
        finish = "aborted" if aborted else "stop" if ids[-1] == 0 else "length"
        ids, logprobs = ids[len(request.continued) :], logprobs[len(request.continued) :]
        self._samples += len(ids)
        self._prompts += len(request.prompt_ids)
        text = decode(ids.tolist()) if request.stream or request.params.stop else None
        spans = (VersionSpan(self._version, 0, len(ids)),) if len(ids) else ()
        return SampleOutput(request.request_id, sample, ids, logprobs, None, spans, finish, text=text)

    async def prompt_logprobs(self, prompt_ids: Ids, top: int = 0) -> PromptLogprobs:
        """Numbers that depend only on the token."""
        await self._gate.wait()
        found = -1 - (np.asarray(prompt_ids) % 7).astype(np.float32)
        found[:1] = 0
        most = min(top, 128)
        ids = np.tile(np.arange(most, dtype=np.int32), (len(found), 1))
        best = TopLogprobs(ids, np.tile(-1 - np.arange(most, dtype=np.float32), (len(found), 1)))
        best.token_ids[:1], best.logprobs[:1] = -1, 0
        return PromptLogprobs(found, best if top else None)

    async def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(name for name in request_ids if name in self._running))
        self._running |= dict.fromkeys(found, True)
        return found

    async def pause(self) -> None:
        self._gate.clear()

    async def resume(self) -> None:
        self._gate.set()

    async def offload(self) -> None:
        await self.pause()

    async def onload(self) -> None:
        await self.resume()

    async def stage_weights(self, source: WeightsSource, expected: str | None = None) -> str:
        assert not isinstance(source, Mapping)
        self._staged = policy.read_version(source)
        return policy.digest(self._staged).root

    async def swap_weights(self, version: int) -> None:
        if self._staged is None:
            if version == self._version:
                return
            raise NothingStaged(f"version {version} was not staged")
        self.words, self._staged, self._version = self._staged, None, version
        self._epoch += 1

    async def weights_digest(self) -> str:
        return policy.digest(self.words).root

    def stats(self) -> EngineStats:
        return EngineStats(
            slots=self._slots,
            active=len(self._running),
            queued=0,
            paused=not self._gate.is_set(),
            version=self._version,
            cache_epoch=self._epoch,
            generated_tokens=self._samples,
            prompt_tokens=self._prompts,
            steps=self._samples,
            busy_seconds=0.0,
            forward_seconds=0.0,
            tokens_per_second=0.0,
        )

    async def shutdown(self) -> None:
        self._closed = True
        self._gate.set()


class SimText(Text):
    """The tokenizer: each character is a token."""

    def __init__(self) -> None:
        self.tokenizer: Any = SimpleNamespace(added_tokens_decoder={})

    @property
    def template(self) -> str:
        return policy.TEMPLATE

    @property
    def eos_id(self) -> int | None:
        return 0

    @property
    def size(self) -> int:  # type: ignore[override]
        return 128

    @property
    def special(self) -> Mapping[int, str]:  # type: ignore[override]
        return {}

    def whole(self, sequences: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        return self.decode(sequences)

    def pieces(self, ids: np.ndarray) -> list[str]:
        return [decode([at]) for at in ids.tolist()]

    def token_bytes(self, ids: np.ndarray) -> list[bytes]:
        return [decode([at]).encode() for at in ids.tolist()]

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[np.ndarray]:
        return [np.array([ord(c) if 32 <= ord(c) < 127 else 63 for c in text], np.int32) for text in texts]

    def decode(self, sequences: Iterable[Sequence[int] | np.ndarray]) -> list[str]:
        return [decode(list(ids)) for ids in sequences]

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **_: Any) -> str:
        offered = "".join(f"{tool['function']['name']} " for tool in tools)
        return (f"<tools>{offered}</tools>" if tools else "") + "\n".join(str(message["content"]) for message in messages)


def decode(ids: Sequence[int]) -> str:
    """The text of tokens, without the end."""
    return "".join(chr(i) for i in ids if i)
