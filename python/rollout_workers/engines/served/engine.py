"""Implements ``Engine`` with a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rollout_workers.engines.base import (
    EngineStats,
    GroupRequest,
    Ids,
    PromptLogprobs,
    SampleDelta,
    SampleOutput,
    TopLogprobs,
    WeightsSource,
)
from rollout_workers.engines.errors import ContextOverflow, DuplicateRequest, InvalidPrompt, TokenizerMissing
from rollout_workers.engines.served.requests import Requests
from rollout_workers.engines.served.server import Server
from rollout_workers.engines.staging import Staging
from rollout_workers.engines.transformers.stream import Outbox, Stream
from rollout_workers.engines.transformers.text import Tokenizer
from rollout_workers.weights import named_weights
from rollout_workers.weights.naming import dtype_name
from rollout_workers.weights.store import TENSOR_FILE
from rollout_workers.weights.tensor_file import write_tensors

T = TypeVar("T")


class ServedEngine:
    """Samples with a ``Server``, which it does not share."""

    def __init__(
        self,
        server: Server,
        folder: str,
        *,
        slots: int,
        max_len: int,
        dtype: str,
        version: int = 0,
        text: bool = True,
        verify: str = "full",
    ) -> None:
        """server: with the weights ``version`` of the folder. text: whether the folder has a
        tokenizer. verify: see ``LoadRequest``. Raises ``ModelUnsupported`` if the weights can't be
        read back."""
        self._server = server
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True) if text else None
        self._tokenizer: Tokenizer | None = tokenizer
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        tensors = dict(named_weights(module))
        self._staging = Staging(tensors)
        self._transport = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}
        self._outbox = Outbox()
        self._requests = Requests(
            server, self._outbox, self._tokenizer, end_ids(folder, config, tokenizer),
            slots=slots, max_len=max_len, vocabulary=config.get_text_config().vocab_size, version=version,
        )  # fmt: skip
        self._vocabulary = config.get_text_config().vocab_size
        self._max_len = max_len
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-engine-")
        self._changes = asyncio.Lock()
        if verify != "none":
            server.digest(self._transport)

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncGenerator[SampleDelta | SampleOutput, None]:
        batch = tuple(batch)
        self._check_text(batch)
        stream = Stream(self._outbox, sum(len(request.seeds) for request in batch))
        try:
            await self._call(lambda: self._submit(batch, stream))
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
        prompt = np.asarray(prompt_ids, np.int64)
        if prompt.ndim != 1 or not len(prompt):
            raise InvalidPrompt("the prompt to score must be one-dimensional with at least one token id")
        if len(prompt) > self._max_len:
            raise ContextOverflow("of a prompt to score", len(prompt), self._max_len)
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            raise InvalidPrompt(f"the prompt to score has token ids outside the vocabulary of {self._vocabulary}")
        scored = await self._ask(self._requests.score(prompt.tolist(), min(top, self._vocabulary)))
        logprobs = np.array([0.0, *scored.logprobs], np.float32)
        if not top:
            return PromptLogprobs(logprobs)
        rows = [[(0.0, -1)] * top, *scored.top]
        return PromptLogprobs(
            logprobs,
            TopLogprobs(
                np.array([[pair[1] for pair in row] for row in rows], np.int32),
                np.array([[pair[0] for pair in row] for row in rows], np.float32),
            ),
        )

    async def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        ids = tuple(request_ids)
        return await self._call(lambda: self._requests.abort(ids))

    async def pause(self) -> None:
        await self._ask(self._requests.pause())

    async def resume(self) -> None:
        await self._ask(self._requests.resume())

    async def offload(self) -> None:
        await self._ask(self._requests.offload())

    async def onload(self) -> None:
        await self._ask(self._requests.onload())

    async def stage_weights(self, source: WeightsSource, expected: str | None = None) -> str:
        return await asyncio.to_thread(self._staging.stage, source, expected)

    async def swap_weights(self, version: int) -> None:
        if version == self._requests.version and not self._staging:
            return
        async with self._changes:
            tensors = self._staging.take()
            folder = await asyncio.to_thread(self._write, tensors)
            await self._ask(self._requests.swap(folder, version))
            self._transport = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}

    async def weights_digest(self) -> str:
        async with self._changes:
            return await asyncio.to_thread(self._server.digest, self._transport)

    def stats(self) -> EngineStats:
        return self._requests.stats()

    async def shutdown(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Abort all samples and close the server; blocks."""
        with contextlib.suppress(Exception):
            self._server.call(self._requests.end()).result(timeout=10)
        self._server.close()
        self._folder.cleanup()

    def _write(self, tensors: Any) -> str:
        """A folder with these tensors. The server reads a folder only when it swaps, so a copy
        protects from changes of the source."""
        folder = Path(self._folder.name) / "staged"
        folder.mkdir(exist_ok=True)
        write_tensors(folder / TENSOR_FILE, tensors)
        return str(folder)

    async def _ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._server.call(coroutine))

    async def _call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return await self._ask(run())

    def _submit(self, batch: tuple[GroupRequest, ...], stream: Stream) -> None:
        seen = set(self._requests.groups)
        for request in batch:
            if request.request_id in seen:
                raise DuplicateRequest(f"request {request.request_id} is still being sampled; abort it or use another id")
            seen.add(request.request_id)
        self._requests.submit(batch, stream)

    def _forget(self, request_ids: list[str]) -> None:
        """Abort without waiting, because the caller of ``generate`` has stopped iterating."""

        async def run() -> None:
            self._requests.abort(request_ids)

        with contextlib.suppress(Exception):
            self._server.call(run())

    def _check_text(self, batch: tuple[GroupRequest, ...]) -> None:
        for request in batch:
            if self._tokenizer is None and (request.stream or request.params.stop or request.params.constraint):
                raise TokenizerMissing(
                    f"request {request.request_id} asks for text (stop strings, streaming, or a constraint); "
                    "build the engine with the model's tokenizer"
                )


def has_tokenizer(folder: str) -> bool:
    """Whether a model's folder has the files of a tokenizer."""
    return any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def end_ids(folder: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a sample: those of the generation config, the model config, and the
    tokenizer."""
    generation: Any = None
    if os.path.isfile(os.path.join(folder, "generation_config.json")):
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    found: list[int] = []
    for source in (generation, config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += [ids] if isinstance(ids, int) else list(ids or ())
    return tuple(dict.fromkeys(found))
