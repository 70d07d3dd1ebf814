"""The engines: what each can do and how it is loaded. Importing this module imports neither torch
nor an engine.

    python -m rollout_workers.engines.registry         # the table as JSON
    python -m rollout_workers.engines.registry vllm    # one engine in this environment, for the planner

To add an engine, write a package with ``load(request: LoadRequest) -> Engine``, add a row to
``ENGINES`` and its name to ``EngineConfig.kind`` in ``run_config.proto``, and run
``rollout_testing.enginetest`` on it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Literal, cast

from rollout_workers.engines.base import Engine


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of an engine. The defaults are those of an engine that only samples.

    attention: supported kinds of layers, as in ``layer_types`` of a model's config; empty: all.
    long_rope: decodes beyond the length from which position embeddings depend on the sequence's
    length (``longrope``, ``dynamic``). beyond_chunk: decodes beyond ``attention_chunk_size``.
    local_attention: decodes beyond GPT-Neo's ``window_size``. logprobs_mode: ``sampled``: of the
    distribution after temperature and filters; ``model``: of the unmodified softmax. raw_logprobs:
    also reports the unmodified softmax (``SampleOutput.raw_logprobs``). top_logprobs: maximum
    number of alternatives reported per token. prompt_logprobs: scores the tokens of a prompt.
    constraints: supported kinds of ``Constraint``. images, adapters,
    priorities, sessions: supported in a request. greedy: temperature 0 takes the most likely token.
    deterministic: can give equal bits for equal requests, independent of other requests.
    parameters: supported fields of ``SamplingParams`` after ``ignore_eos``. continues: supports
    ``GroupRequest.continued``. verifies: supported values of ``weights.verify``: ``full`` if its
    tensors can be read back, ``sampled`` if it has ``SampledWeights``. swaps_in_flight: new weights
    apply to samples in progress, which then have several version spans. devices: supported kinds.
    most_gpus: maximum number of GPUs of one engine.
    """

    attention: tuple[str, ...] = ()
    long_rope: bool = False
    beyond_chunk: bool = False
    local_attention: bool = False
    logprobs_mode: Literal["sampled", "model"] = "sampled"
    raw_logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    constraints: tuple[str, ...] = ()
    images: bool = False
    adapters: bool = False
    priorities: bool = False
    sessions: bool = False
    greedy: bool = True
    deterministic: bool = False
    parameters: tuple[str, ...] = ()
    continues: bool = False
    verifies: tuple[str, ...] = ("full", "none")
    swaps_in_flight: bool = False
    devices: tuple[str, ...] = ("cpu",)
    most_gpus: int = 0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments for loading an engine.

    folder: model in the Hugging Face layout, with weights ``version``. dtype: e.g. ``float32``.
    slots: number of samples that are decoded concurrently. max_len: tokens of prompt and
    completion. threads: CPU threads; 0: the library's default. devices: ``cpu``, or the worker's
    GPUs as ``cuda:N``; an engine that needs one GPU uses the first. verify: ``weights.verify``;
    with ``none`` an engine also loads models whose tensors it can't read back. url: of a server
    that has the model already; empty: the engine runs in this process or starts its own.
    """

    folder: str
    version: int
    dtype: str
    slots: int
    max_len: int
    deterministic: bool = False
    threads: int = 0
    devices: tuple[str, ...] = ("cpu",)
    verify: str = "full"
    url: str = ""


Loader = Callable[[LoadRequest], Engine]


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine. loader: ``module:function``, imported when the engine is loaded; the function
    blocks. package: the module that the environment must have for it; empty: no other than those of
    every worker. remote: the loader for ``LoadRequest.url``, which needs no package; empty:
    none."""

    loader: str
    capabilities: Capabilities
    package: str = ""
    remote: str = ""


ENGINES: dict[str, Entry] = {
    "transformers": Entry(
        "rollout_workers.engines.transformers.engine:load",
        Capabilities(
            attention=("full_attention", "sliding_attention", "chunked_attention"),
            raw_logprobs=True,
            top_logprobs=20,
            parameters=(
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "logit_bias",
                "min_tokens",
                "top_logprobs",
                "constraint",
            ),
            constraints=("json_schema", "json_object", "regex", "grammar", "choices"),
            continues=True,
            sessions=True,
            prompt_logprobs=True,
            deterministic=True,
            verifies=("full", "sampled", "none"),
            swaps_in_flight=True,
            devices=("cpu", "cuda"),
            most_gpus=1,
        ),
    ),
    "vllm": Entry(
        "rollout_workers.engines.vllm:load",
        Capabilities(
            long_rope=True,
            beyond_chunk=True,
            local_attention=True,
            top_logprobs=20,
            prompt_logprobs=True,
            constraints=("json_schema", "json_object", "regex", "grammar", "choices"),
            sessions=True,
            parameters=(
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "logit_bias",
                "min_tokens",
                "top_logprobs",
                "constraint",
            ),
            continues=True,
            swaps_in_flight=True,
        ),
        package="vllm",
        remote="rollout_workers.engines.vllm.remote:load",
    ),
    "sglang": Entry(
        "rollout_workers.engines.sglang.engine:load",
        Capabilities(
            long_rope=True,
            beyond_chunk=True,
            local_attention=True,
            top_logprobs=20,
            prompt_logprobs=True,
            constraints=("json_schema", "json_object", "regex", "grammar", "choices"),
            parameters=(
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "logit_bias",
                "min_tokens",
                "top_logprobs",
                "constraint",
            ),
            continues=True,
            swaps_in_flight=True,
        ),
        package="sglang",
    ),
}
DEFAULT = "transformers"


class UnknownEngine(ValueError):
    """``engine.kind`` names an engine that this worker does not have."""

    reason = "UNKNOWN_ENGINE"


def entry(kind: str) -> Entry:
    """The engine with this name; empty: the default. Raises :class:`UnknownEngine`."""
    found = ENGINES.get(kind or DEFAULT)
    if found is None:
        raise UnknownEngine(
            f"engine {kind!r} is unknown: set `engine.kind` to one of {', '.join(ENGINES)}, or update the workers"
        )
    return found


def load(kind: str, request: LoadRequest) -> Engine:
    """Load an engine; blocks. Raises :class:`UnknownEngine` and the errors of its loader."""
    found = entry(kind)
    if request.url and not found.remote:
        raise UnknownEngine(f'the engine {kind!r} has no servers: remove `engine.url`, or set `engine.kind = "vllm"`')
    module, _, function = (found.remote if request.url else found.loader).partition(":")
    return cast(Loader, getattr(importlib.import_module(module), function))(request)


def table() -> dict[str, dict[str, object]]:
    """Capabilities by engine."""
    return {name: asdict(found.capabilities) for name, found in ENGINES.items()}


def here(kind: str) -> dict[str, object]:
    """One engine in this environment: its capabilities, and the package that is missing, or "".
    Raises :class:`UnknownEngine`."""
    found = entry(kind)
    missing = found.package if found.package and find_spec(found.package) is None else ""
    return {"capabilities": asdict(found.capabilities), "missing": missing}


if __name__ == "__main__":
    print(json.dumps(here(sys.argv[1]) if sys.argv[1:] else table(), indent=2))
