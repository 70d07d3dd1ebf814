"""vLLM as an engine, in this process.

    environment   installed by ``make engine-vllm``; `engine.python` names its interpreter
    engine.py     the asyncio interface
    scheduling.py requests and samples, between vLLM's steps
    core.py       vLLM's engine core: one step at a time, weights, caches
    sampling.py   sampling parameters, seeds, penalties of continued samples
    weights.py    loads through the model's own loader, and reads the tensors back
    seeds.py      the seed of a token

A thread runs vLLM's ``EngineCore`` step by step, without a second process and without a server.
Between two steps nothing is in flight, so a swap happens at a known token of each sample, and
``pause`` is exact. A swap empties the prefix cache and vLLM recomputes the keys and values of the
samples in progress: a sample never mixes keys and values of two versions. Requests also salt the
prefix cache with the cache epoch.

The random number of a token depends on its seed and index alone: before each step the generator of
each sample is set from both. On CPUs vLLM would pack the weights of linear layers, and a packed
tensor can't be read back; this engine leaves them as they are.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout_workers.engines.registry import LoadRequest
    from rollout_workers.engines.vllm.engine import VllmEngine

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V1 runner has a generator per request
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # one more token than the context, see core.py
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # in eager mode vLLM would still compile a function of the sampler
}
"""Read when vLLM is imported. A value from outside has precedence."""


def prepare() -> None:
    """Set the environment for vLLM in this process, before its first import."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def load(request: LoadRequest) -> VllmEngine:
    """Load the engine for the registry. Raises ``ModelUnsupported``, ``WeightsIncomplete``."""
    prepare()
    from rollout_workers.engines.vllm.engine import load

    return load(request)
