"""The asyncio interface of the decoding thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollout_workers.engines.base import EngineStats, GroupRequest, Ids, PromptLogprobs, SampleDelta, SampleOutput, WeightsSource
from rollout_workers.engines.errors import DuplicateRequest, EngineClosed, TokenizerMissing
from rollout_workers.engines.registry import LoadRequest
from rollout_workers.engines.transformers.config import EngineConfig
from rollout_workers.engines.transformers.current_weights import CurrentWeights
from rollout_workers.engines.transformers.decoder import Decoder
from rollout_workers.engines.transformers.determinism import verify
from rollout_workers.engines.transformers.stream import Outbox, Stream
from rollout_workers.engines.transformers.text import Tokenizer
from rollout_workers.engines.transformers.thread import DecodingThread
from rollout_workers.weights.pretrained import load_whole

T = TypeVar("T")


class TransformersEngine:
    """Implements ``Engine`` for a causal language model of Hugging Face. The engine owns the
    module."""

    def __init__(
        self, module: PreTrainedModel, config: EngineConfig, *, tokenizer: Tokenizer | None = None, version: int = 0
    ) -> None:
        """Move the module to its device, check that it can be decoded, and start the decoding
        thread.

        tokenizer: needed for stop strings and streaming. version: of the module's weights. Raises
        ``ModelUnsupported``.
        """
        device = torch.device(config.device) if config.device else next(module.parameters()).device
        nn.Module.to(module.eval(), device)
        self._weights = CurrentWeights(module)
        self._tokenizer = tokenizer
        self._outbox = Outbox()

        def build() -> Decoder:
            decoder = Decoder(module, config, tokenizer, end_ids(module, tokenizer), version)
            if config.deterministic:
                verify(decoder.forward, decoder.cache, config, decoder.vocabulary)
            return decoder

        self._thread = DecodingThread(build, self._outbox.flush, config.threads)

    @classmethod
    def load(
        cls,
        model_dir: str | os.PathLike[str],
        config: EngineConfig,
        *,
        dtype: torch.dtype | None = None,
        version: int = 0,
    ) -> TransformersEngine:
        """An engine for the model and the tokenizer in a folder; uses no network. ``dtype`` None:
        the dtype of the checkpoint. Raises ``WeightsIncomplete``."""
        module = load_whole(AutoModelForCausalLM, model_dir, dtype=dtype or "auto")
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        return cls(module, config, tokenizer=tokenizer, version=version)

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncGenerator[SampleDelta | SampleOutput, None]:
        batch = tuple(batch)
        self._check_text(batch)
        if wanted := {r.params.constraint for r in batch if r.params.constraint is not None}:
            await asyncio.to_thread(lambda: [self._decoder.constraints.compiled(constraint) for constraint in wanted])
        stream = Stream(self._outbox, sum(len(request.seeds) for request in batch))
        try:
            await self._ask(lambda: self._submit(batch, stream))
        except asyncio.CancelledError:  # the decoding thread may have received it already
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
        await self._ask(lambda: self._decoder.score(np.asarray(prompt_ids, np.int64), top, answer))
        return await asyncio.wrap_future(answer)

    async def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        ids = tuple(request_ids)
        return await self._ask(lambda: self._decoder.abort(ids))

    async def pause(self) -> None:
        await self._ask(lambda: setattr(self._decoder, "paused", True))

    async def resume(self) -> None:
        await self._ask(lambda: setattr(self._decoder, "paused", False))

    async def offload(self) -> None:
        await self._ask(lambda: self._move(self._decoder.offload))

    async def onload(self) -> None:
        await self._ask(lambda: self._move(self._decoder.onload))

    async def stage_weights(self, source: WeightsSource, expected: str | None = None) -> str:
        return await asyncio.to_thread(self._weights.stage, source, expected)

    async def swap_weights(self, version: int) -> None:
        await self._ask(lambda: self._swap(version))

    async def weights_digest(self) -> str:
        self._thread.check_open()
        return (await asyncio.to_thread(self._weights.digest)).root

    async def check_weights(self, seed: int, most_bytes: int) -> str:
        self._thread.check_open()
        return await asyncio.to_thread(self._weights.check, seed, most_bytes)

    def stats(self) -> EngineStats:
        return self._decoder.stats()

    async def shutdown(self) -> None:
        with contextlib.suppress(EngineClosed):
            await self._ask(lambda: self._decoder.end("the engine was shut down"))
        await asyncio.to_thread(self._thread.close)

    @property
    def _decoder(self) -> Decoder:
        return self._thread.decoder

    async def _ask(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))

    def _submit(self, batch: tuple[GroupRequest, ...], stream: Stream) -> None:
        seen = set(self._decoder.groups)
        for request in batch:
            if request.request_id in seen:
                raise DuplicateRequest(f"request {request.request_id} is still being sampled; abort it or use another id")
            seen.add(request.request_id)
        self._decoder.submit(batch, stream)

    def _forget(self, request_ids: list[str]) -> None:
        """Abort without waiting, because the caller of ``generate`` has stopped iterating."""
        try:
            future: Future[tuple[str, ...]] = self._thread.call(lambda: self._decoder.abort(request_ids))
        except EngineClosed:
            return
        future.add_done_callback(lambda done: done.exception())

    def _move(self, function: Callable[[], None]) -> None:
        """Move weights to another device. Waits for a running digest."""
        with self._weights.still:
            function()

    def _swap(self, version: int) -> None:
        if version == self._decoder.version and not self._weights.staged:
            return
        self._weights.load()
        self._decoder.new_weights(version)

    def _check_text(self, batch: tuple[GroupRequest, ...]) -> None:
        for request in batch:
            if self._tokenizer is None and (request.stream or request.params.stop or request.params.constraint):
                raise TokenizerMissing(
                    f"request {request.request_id} asks for text (stop strings, a constraint, or streaming); "
                    "build the engine with the model's tokenizer"
                )


def load(request: LoadRequest) -> TransformersEngine:
    """Load the engine for the registry. Raises ``ModelUnsupported``, ``WeightsIncomplete``."""
    config = EngineConfig(
        slots=request.slots,
        max_len=request.max_len,
        deterministic=request.deterministic,
        threads=request.threads or None,
        device=request.devices[0],
    )
    return TransformersEngine.load(request.folder, config, dtype=getattr(torch, request.dtype), version=request.version)


def end_ids(module: PreTrainedModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a sample: those of the generation config, the model config, and the
    tokenizer."""
    found: list[int] = []
    for source in (getattr(module, "generation_config", None), module.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += [ids] if isinstance(ids, int) else list(ids or ())
    return tuple(dict.fromkeys(found))
