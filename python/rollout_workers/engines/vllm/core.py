"""vLLM's engine core in this process."""
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from torch import Tensor
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from rollout_workers.engines.errors import InvalidConstraint
from rollout_workers.engines.vllm.sampling import ContinuedPenalties
from rollout_workers.engines.vllm.weights import LoadedWeights, keep_linear_weights

log = logging.getLogger(__name__)

BLOCK_TOKENS = 32
"""Tokens of a block of keys and values. Prefixes are reused in whole blocks, and vLLM's kernels for
CPUs need a multiple of 32."""
MOST_LOGPROBS = 20
_MOST_MEMORY = 0.4
"""Part of the free memory that keys and values may take. With less than every slot needs, vLLM
preempts samples and computes them again."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the engine; see ``LoadRequest``. text: whether the folder has a tokenizer."""

    folder: str
    dtype: str
    slots: int
    max_len: int
    text: bool = True
    verify: str = "full"


class Core:
    """Runs requests of one sample each. Everything here runs in one thread."""

    def __init__(self, settings: Settings, tensors: Mapping[str, Tensor], tokenizer: Any) -> None:
        """Build the model with ``tensors``. Raises ``ModelUnsupported``."""
        keep_linear_weights()
        config = EngineArgs(
            model=settings.folder,
            skip_tokenizer_init=not settings.text,
            dtype=settings.dtype,
            # a scored prompt may fill the context, and vLLM also samples a token after it
            max_model_len=settings.max_len + 1,
            max_num_seqs=settings.slots,
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            load_format="dummy",
            logprobs_mode="processed_logprobs",
            max_logprobs=MOST_LOGPROBS,
            logits_processors=[ContinuedPenalties],
            enable_prefix_caching=True,
            async_scheduling=False,
            generation_config="vllm",
            distributed_executor_backend="uni",
            disable_log_stats=True,
        ).create_engine_config()
        # Of whichever library compiles a constraint: with any whitespace, a sample could be spaces
        # up to its limit.
        config.structured_outputs_config.disable_any_whitespace = True
        config.cache_config.kv_cache_memory_bytes = _cache_bytes(config, settings)
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._tokenizer = tokenizer
        self._config = config
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self.vocabulary: int = config.model_config.get_vocab_size()
        self.weights = LoadedWeights(self._runner.model, self._runner.model.load_weights, tensors, settings.verify)

    @property
    def running(self) -> int:
        """Number of requests with keys and values."""
        return len(self._core.scheduler.running)

    def add(self, name: str, ids: list[int], params: VllmParams, salt: str, continued: Sequence[int] = ()) -> None:
        """Queue a request. continued: the end of ``ids`` that a constraint applies to. Raises
        ``InvalidConstraint``."""
        if params.structured_outputs is not None:
            try:
                params.verify(self._config.model_config, None, self._config.structured_outputs_config, self._tokenizer)
            except (ValueError, VLLMClientError) as error:
                raise InvalidConstraint(f"request {name}: vLLM can't apply the constraint: {error}") from error
        request, wave = self._core.preprocess_add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=ids,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=salt,
                data_parallel_rank=None,
            )
        )
        if continued and request.structured_output_request is not None:
            self._advance(name, request, continued)
        self._core.add_request(request, wave)

    def abort(self, names: Sequence[str]) -> None:
        """End these requests; unknown ones are ignored."""
        self._core.abort_requests(list(names))

    def step(self, seeds: Mapping[str, int]) -> list[EngineCoreOutput]:
        """Schedule, run the model once, and sample. seeds: of the next token of each request."""
        for name, seed in seeds.items():
            state = self._runner.requests.get(name)
            if state is not None and state.generator is not None:
                state.generator.manual_seed(seed)
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        if not executed:
            time.sleep(0.001)  # a grammar is being compiled
        found = outputs.get(0) if outputs else None
        return found.outputs if found else []

    def forget_keys(self) -> None:
        """Empty the prefix cache. Requests in progress compute their keys and values again."""
        self._core.scheduler.reset_prefix_cache(reset_running_requests=True)
        self._core.reset_encoder_cache()

    def close(self) -> None:
        self._core.shutdown()

    def _advance(self, name: str, request: Any, continued: Sequence[int]) -> None:
        """Let the grammar of a request accept the tokens that were sampled before."""
        state = request.structured_output_request
        while not state.is_grammar_ready:
            time.sleep(0.001)
        if isinstance(state.grammar, Exception) or not state.grammar.accept_tokens(name, list(continued)):
            raise InvalidConstraint(f"request {name}: the continued tokens do not match the constraint")


def _cache_bytes(config: VllmConfig, settings: Settings) -> int:
    """Memory for keys and values: of all slots at full length, if there is so much."""
    model = config.model_config
    heads, size = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    block = 2 * model.get_num_layers(config.parallel_config) * heads * size * model.dtype.itemsize * BLOCK_TOKENS
    one = (-(-(settings.max_len + 1) // BLOCK_TOKENS) + 1) * block
    free = int(psutil.virtual_memory().available * _MOST_MEMORY)
    wanted = one * settings.slots
    if wanted > free:
        log.warning(
            "keys and values of %d slots need %d MiB, and %d MiB are free: long samples may be preempted; lower engine.slots "
            "or engine.max_model_len", settings.slots, wanted >> 20, free >> 20,
        )  # fmt: skip
    return max(one, min(wanted, free))
