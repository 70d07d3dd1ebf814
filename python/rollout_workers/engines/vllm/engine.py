"""The asyncio interface of vLLM's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_workers.engines.base import EngineStats, GroupRequest, Ids, PromptLogprobs, SampleDelta, SampleOutput, WeightsSource
from rollout_workers.engines.errors import DuplicateRequest, EngineClosed, ModelUnsupported, TokenizerMissing
from rollout_workers.engines.registry import LoadRequest
from rollout_workers.engines.transformers.engine import end_ids
from rollout_workers.engines.transformers.stream import Outbox, Stream
from rollout_workers.engines.transformers.thread import DecodingThread
from rollout_workers.engines.vllm.core import Core, Settings
from rollout_workers.engines.vllm.scheduling import Scheduling
from rollout_workers.weights import named_weights
from rollout_workers.weights.pretrained import load_whole

T = TypeVar("T")


class VllmEngine:
    """Implements ``Engine`` with vLLM."""

    def __init__(self, settings: Settings, *, version: int = 0, threads: int | None = None) -> None:
        """Load the model of ``settings.folder``; blocks. Its tensors are first loaded as the
        learner loads them, so that names and digests are the same. Raises ``ModelUnsupported``,
        ``WeightsIncomplete``."""
        module = load_whole(AutoModelForCausalLM, settings.folder, dtype=getattr(torch, settings.dtype))
        tokenizer: Any = None
        if settings.text:
            tokenizer = AutoTokenizer.from_pretrained(settings.folder, local_files_only=True)
        ends, tensors = end_ids(module, tokenizer), dict(named_weights(module))
        self._tokenizer = tokenizer
        self._outbox = Outbox()

        def build() -> Scheduling:
            core = Core(settings, tensors, tokenizer)
            tensors.clear()
            return Scheduling(core, tokenizer, ends, slots=settings.slots, max_len=settings.max_len, version=version)

        self._thread: DecodingThread[Scheduling] = DecodingThread(build, self._outbox.flush, threads)
        self._weights = self._thread.decoder.core.weights

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncGenerator[SampleDelta | SampleOutput, None]:
        batch = tuple(batch)
        self._check_text(batch)
        stream = Stream(self._outbox, sum(len(request.seeds) for request in batch))
        try:
            await self._ask(lambda: self._submit(batch, stream))
        except asyncio.CancelledError:  # the thread may have received it already
            self._forget([request.request_id for request in batch])
            raise
        try:
            async for item in stream.items():
                yield item
        finally:
            if not stream.drained:
                self._forget([request.request_id for request in batch])

    async def prompt_logprobs(self, prompt_ids: Ids, top: int = 0) -> PromptLogprobs:
        answer: Future[PromptLogprobs] = Future()
        await self._ask(lambda: self._scheduling.score(np.asarray(prompt_ids, np.int64), top, answer))
        return await asyncio.wrap_future(answer)

    async def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        ids = tuple(request_ids)
        return await self._ask(lambda: self._scheduling.abort(ids))

    async def pause(self) -> None:
        await self._ask(lambda: setattr(self._scheduling, "paused", True))

    async def resume(self) -> None:
        await self._ask(lambda: setattr(self._scheduling, "paused", False))

    async def offload(self) -> None:
        """On a CPU the memory is the host's already, so only decoding stops."""
        await self._ask(lambda: setattr(self._scheduling, "offloaded", True))

    async def onload(self) -> None:
        await self._ask(lambda: setattr(self._scheduling, "offloaded", False))

    async def stage_weights(self, source: WeightsSource, expected: str | None = None) -> str:
        return await asyncio.to_thread(self._weights.stage, source, expected)

    async def swap_weights(self, version: int) -> None:
        await self._ask(lambda: self._swap(version))

    async def weights_digest(self) -> str:
        self._thread.check_open()
        return (await asyncio.to_thread(self._weights.digest)).root

    def stats(self) -> EngineStats:
        return self._scheduling.stats()

    async def shutdown(self) -> None:
        with contextlib.suppress(EngineClosed):
            await self._ask(self._end)
        await asyncio.to_thread(self._thread.close)

    @property
    def _scheduling(self) -> Scheduling:
        return self._thread.decoder

    async def _ask(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))

    def _end(self) -> None:
        self._scheduling.end("the engine was shut down")
        self._scheduling.core.close()

    def _submit(self, batch: tuple[GroupRequest, ...], stream: Stream) -> None:
        seen = set(self._scheduling.groups)
        for request in batch:
            if request.request_id in seen:
                raise DuplicateRequest(f"request {request.request_id} is still being sampled; abort it or use another id")
            seen.add(request.request_id)
        self._scheduling.submit(batch, stream)

    def _forget(self, request_ids: list[str]) -> None:
        """Abort without waiting, because the caller of ``generate`` has stopped iterating."""
        try:
            future: Future[tuple[str, ...]] = self._thread.call(lambda: self._scheduling.abort(request_ids))
        except EngineClosed:
            return
        future.add_done_callback(lambda done: done.exception())

    def _swap(self, version: int) -> None:
        if version == self._scheduling.version and not self._weights.staged:
            return
        self._weights.load()
        self._scheduling.new_weights(version)

    def _check_text(self, batch: tuple[GroupRequest, ...]) -> None:
        for request in batch:
            if self._tokenizer is None and (request.stream or request.params.stop or request.params.constraint):
                raise TokenizerMissing(
                    f"request {request.request_id} asks for text (stop strings, streaming, or a constraint); "
                    "build the engine with the model's tokenizer"
                )


def load(request: LoadRequest) -> VllmEngine:
    """Load the engine for the registry. Raises ``ModelUnsupported``, ``WeightsIncomplete``."""
    if request.deterministic:
        raise ModelUnsupported("vLLM does not give the same bits each time: remove `deterministic = true`")
    if request.devices[0] != "cpu":
        raise ModelUnsupported(f"the engine `vllm` runs on CPUs only, not on {request.devices[0]}: hide the GPUs from the worker")
    text = any((Path(request.folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
    settings = Settings(request.folder, request.dtype, request.slots, request.max_len, text, request.verify)
    return VllmEngine(settings, version=request.version, threads=request.threads or None)
