"""``SGLangWorker``: RLinf's interface of a rollout worker, on ``sgl.Engine``.

worker = SGLangWorker(config, placement)          # config: an OmegaConf config, a mapping, or any object
await worker.init_worker()
result, _ = await worker.async_generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 8})
await worker.sync_model_from_actor()
worker.shutdown()
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rollout_workers.engines.errors import EngineError
from rollout_workers.engines.sglang.stitch import stitch

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_workers.engines.sglang.server import Server

WeightReload = Literal["sync", "cpu", None]
Buckets = Callable[[int, int], "AsyncIterator[Mapping[str, Tensor]]"]
"""(rank, world size) -> the learner's weights in buckets, by Hugging Face name."""

_BUCKET_BYTES = 256 << 20


class WeightReloadInvalid(ValueError):
    """``weight_reload`` has an unknown value."""

    reason = "WEIGHT_RELOAD_INVALID"


class WeightReloadRefused(EngineError):
    """The value of ``weight_reload`` does not allow the call."""

    reason = "WEIGHT_RELOAD_REFUSED"


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One prompt that is sampled ``group_size`` times, with what aborts left of it.

    results: of each sample, all segments stitched; None before the first. aborted: the indexes of
    samples that must continue.
    """

    input_ids: list[int]
    group_size: int
    image_data: list[Any] | None = None
    results: list[dict[str, Any] | None] = field(init=False)
    aborted: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size: {self.group_size} is not at least 1")
        self.results = [None] * self.group_size

    @property
    def all_completed(self) -> bool:
        return not self.aborted and None not in self.results

    def waiting(self) -> list[int]:
        """The indexes of samples that are not complete."""
        return [index for index, result in enumerate(self.results) if result is None or index in self.aborted]

    def record(self, index: int, result: dict[str, Any], most: int) -> None:
        """Add the next segment of a sample."""
        before = self.results[index]
        whole = stitch([result] if before is None else [before, result], most)
        whole["input_ids"] = list(self.input_ids)
        self.results[index] = whole
        (self.aborted.add if whole["meta_info"]["finish_reason"]["type"] == "abort" else self.aborted.discard)(index)


class SGLangWorker:
    """Samples with SGLang under RLinf's names.

    weight_reload: ``sync``: starts with dummy weights, and ``sync_model_from_actor`` loads the
    learner's. ``cpu``: keeps a copy of its weights on the host, which ``onload_engine`` loads.
    None: evaluation with fixed weights.
    """

    def __init__(
        self,
        config: Any,
        placement: Any,
        weight_reload: WeightReload = "sync",
        config_rollout: Any = None,
    ) -> None:
        """config_rollout: default: ``config.rollout``. placement: ``is_collocated`` decides whether
        the engine starts offloaded, and ``weight_buckets(rank, world_size)``, if there is one,
        yields the learner's weights. The rank and the world size are ``RANK`` and ``WORLD_SIZE`` of
        the environment. Raises ``WeightReloadInvalid``.
        """
        if weight_reload not in ("sync", "cpu", None):
            raise WeightReloadInvalid(f"weight_reload: {weight_reload!r} is not one of 'sync', 'cpu', None")
        self.weight_reload = weight_reload
        self._cfg = config
        self._cfg_rollout = _get(config, "rollout") if config_rollout is None else config_rollout
        self._placement = placement
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._return_logprobs = bool(_get(self._cfg_rollout, "return_logprobs", True))
        wanted = _get(self._cfg_rollout, "sampling_params", None)
        if wanted is None:
            wanted = _get(_get(config, "algorithm", None), "sampling_params", None)
        self._sampling_params = None if wanted is None else self.get_sampling_param_from_config(wanted)
        self._buckets: Buckets | None = getattr(placement, "weight_buckets", None)
        self._server: Server | None = None
        self._engine: Any = None
        self._tokenizer: Any = None
        self._running: set[asyncio.Future[Any]] = set()
        self._offloaded = False

    @staticmethod
    def get_sampling_param_from_config(cfg_sampling_params: Any) -> dict[str, Any]:
        """SGLang's sampling parameters. Without ``do_sample``: greedy."""
        names: tuple[str, ...] = ("temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens")
        if not _get(cfg_sampling_params, "do_sample"):
            return {"temperature": 0, "max_new_tokens": _get(cfg_sampling_params, "max_new_tokens")}
        return {name: _get(cfg_sampling_params, name) for name in names}

    async def init_worker(self) -> None:
        """Start SGLang; may be repeated. An engine that shares its devices with the learner starts
        offloaded. Raises ``ModelUnsupported``."""
        if self._server is not None:
            return
        from rollout_workers.engines.sglang.server import Server

        server = await asyncio.to_thread(Server, self._arguments(), threads=int(_get(self._cfg_rollout, "threads", 0)))
        self._server, self._engine = server, server.engine
        if self.weight_reload == "cpu":
            await asyncio.to_thread(server.rpc, "rollout_keep")
        if self.weight_reload is not None and getattr(self._placement, "is_collocated", False):
            await self.offload_engine()

    async def async_generate(
        self,
        prompt: list[str] | str | None = None,
        sampling_params: list[dict[str, Any]] | dict[str, Any] | None = None,
        input_ids: list[list[int]] | list[int] | None = None,
        image_data: list[Any] | None = None,
        return_logprob: list[bool] | bool | None = False,
        request_info: Any | None = None,
    ) -> tuple[Any, Any]:
        """SGLang's result with the ``input_ids``, and ``request_info`` as it was passed. Lists of
        prompts give a list of results. ``image_data`` without any image counts as none."""
        generated = self._on_engine(
            self._engine.async_generate(
                prompt=prompt,
                sampling_params=sampling_params,
                input_ids=input_ids,
                image_data=image_data if image_data is not None and any(image_data) else None,
                return_logprob=return_logprob,
            )
        )
        self._running.add(generated)
        generated.add_done_callback(self._running.discard)
        result = await generated
        for one, ids in self._inputs(result, prompt, input_ids):
            one["input_ids"] = ids
        return result, request_info

    async def generate_group(self, group: SequenceGroup) -> SequenceGroup:
        """Sample what a group lacks: all of it at first, and after an abort the rest of each sample
        from its prompt and partial ids. Call it until ``group.all_completed``."""
        if self._sampling_params is None:
            raise ValueError("rollout.sampling_params is not set: a group needs it")
        most = int(self._sampling_params["max_new_tokens"])

        async def one(index: int) -> None:
            before = group.results[index]
            partial: list[int] = [] if before is None else before["output_ids"]
            params = {**(self._sampling_params or {}), "max_new_tokens": most - len(partial)}
            result, _ = await self.async_generate(
                input_ids=group.input_ids + partial,
                sampling_params=params,
                image_data=group.image_data,
                return_logprob=self._return_logprobs,
                request_info={"seq_idx": index},
            )
            group.record(index, result, most)

        await asyncio.gather(*(one(index) for index in group.waiting()))
        return group

    async def abort_generation(self) -> list[Any]:
        """End all requests. Their ``async_generate`` returns what was sampled so far, with the
        finish reason ``abort``; this call returns the same results."""
        if not self._running:
            return []
        running = tuple(self._running)

        async def abort() -> None:
            self._engine.tokenizer_manager.abort_request(abort_all=True)

        await self._on_engine(abort())
        found = await asyncio.gather(*running, return_exceptions=True)
        return [result for result in found if not isinstance(result, BaseException)]

    async def offload_engine(self) -> None:
        """Release the memory of weights and KV on every tensor-parallel rank; may be repeated.
        Requests must have ended."""
        self._allow("offload_engine", "sync", "cpu")
        if not self._offloaded and self._server is not None:
            await self._on_engine(self._server.release())
            self._offloaded = True

    async def onload_engine(self) -> None:
        """Load the host's copy of the weights on every tensor-parallel rank; may be repeated."""
        self._allow("onload_engine", "cpu")
        if self._offloaded and self._server is not None:
            await self._on_engine(self._server.restore())
            await asyncio.to_thread(self._server.rpc, "rollout_restore")
            self._offloaded = False

    async def sync_model_from_actor(self) -> None:
        """Load the learner's weights, one bucket after the other, and drop the KV of the former
        ones. Restores the memory of an offloaded engine. Waits for running requests."""
        self._allow("sync_model_from_actor", "sync")
        if self._server is None:
            raise EngineError("the worker is not started: call init_worker first")
        if self._offloaded:
            await self._on_engine(self._server.restore())
            self._offloaded = False
        async for bucket in (self._buckets or self._folder_buckets)(self._rank, self._world_size):
            await self._on_engine(self._server.load_tensors(list(bucket.items())))
        await self._on_engine(self._server.flush())

    def attach(self, buckets: Buckets) -> None:
        """Take the learner's weights from ``buckets``."""
        self._buckets = buckets

    def shutdown(self) -> None:
        """End SGLang's processes; may be repeated."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _allow(self, call: str, *values: WeightReload) -> None:
        if self.weight_reload not in values:
            raise WeightReloadRefused(
                f"{call} is not possible with weight_reload = {self.weight_reload!r}; it needs {' or '.join(map(repr, values))}"
            )

    def _on_engine(self, coroutine: Any) -> asyncio.Future[Any]:
        """Run a coroutine in the server's thread, or here without a server."""
        if self._server is None:
            return asyncio.ensure_future(coroutine)
        return asyncio.wrap_future(self._server.call(coroutine))

    def _inputs(self, result: Any, prompt: Any, input_ids: Any) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Each result with its input ids."""
        results: list[dict[str, Any]] = result if isinstance(result, list) else [result]
        if input_ids is None:
            prompts = prompt if isinstance(prompt, list) else [prompt]
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(self._model_path, local_files_only=True)
            all_ids: Sequence[Sequence[int]] = [self._tokenizer(text)["input_ids"] for text in prompts]
        else:
            all_ids = input_ids if isinstance(result, list) else [input_ids]
        for one, ids in zip(results, all_ids, strict=True):
            yield one, list(ids)

    @property
    def _model_path(self) -> str:
        return str(_get(_get(self._cfg_rollout, "model"), "model_path"))

    def _arguments(self) -> dict[str, Any]:
        from rollout_workers.engines.registry import LoadRequest
        from rollout_workers.engines.served.engine import has_tokenizer
        from rollout_workers.engines.sglang.engine import arguments

        rollout = self._cfg_rollout
        precision = str(_get(_get(rollout, "model"), "precision", "fp32"))
        dtypes = {"fp32": "float32", "32": "float32", "bf16": "bfloat16", "fp16": "float16", "16": "float16"}
        request = LoadRequest(
            self._model_path,
            0,
            dtypes.get(precision, precision),
            slots=int(_get(rollout, "max_running_requests", 64)),
            max_len=int(_get(rollout, "max_model_len", 2048)),
        )
        text = has_tokenizer(self._model_path) and bool(_get(rollout, "detokenize", True))
        return {
            **arguments(request, text=text),
            "incremental_streaming_output": False,
            "load_format": "dummy" if self.weight_reload == "sync" else "auto",
            "tp_size": int(_get(rollout, "tensor_parallel_size", 1)),
        }

    async def _folder_buckets(self, rank: int, world_size: int) -> AsyncIterator[Mapping[str, Tensor]]:
        """The weights in the folder ``actor.weights_path``, which the learner publishes."""
        folder = _get(_get(self._cfg, "actor", None), "weights_path", None)
        if folder is None:
            raise EngineError("no learner is attached: set actor.weights_path to the folder of its weights, or call attach")
        from rollout_workers.weights import read_weights

        bucket: dict[str, Tensor] = {}
        size = 0
        for name, tensor in read_weights(folder).items():
            if bucket and size + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = {}, 0
            bucket[name] = tensor
            size += tensor.nbytes
        if bucket:
            yield bucket


_MISSING: Any = object()


def _get(config: Any, name: str, default: Any = _MISSING) -> Any:
    """A value of a mapping or an object. Raises ``KeyError`` without a default."""
    found = config.get(name, _MISSING) if isinstance(config, Mapping) else getattr(config, name, _MISSING)
    if found is _MISSING:
        if default is _MISSING:
            raise KeyError(f"the config has no {name!r}: set it")
        return default
    return found
