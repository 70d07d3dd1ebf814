"""Loads SGLang as an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rollout_workers.engines.errors import ModelUnsupported
from rollout_workers.engines.registry import LoadRequest
from rollout_workers.engines.served.engine import ServedEngine, has_tokenizer
from rollout_workers.engines.sglang.server import Server

_MARGIN = 8
"""Tokens by which SGLang's context is longer than the engine's, because it refuses a prompt that
fills its context."""
_CACHE_BYTES = 1 << 30
"""Memory for keys and values on a CPU. Without a limit SGLang takes most of the memory. If all
slots need more, SGLang lets some samples wait."""


def load(request: LoadRequest) -> ServedEngine:
    """Load the engine for the registry. Raises ``ModelUnsupported``."""
    if request.deterministic:
        raise ModelUnsupported("SGLang does not give the same bits each time: remove `deterministic = true`")
    if request.devices[0] != "cpu":
        raise ModelUnsupported(
            f"the engine `sglang` runs on CPUs only, not on {request.devices[0]}: hide the GPUs from the worker"
        )
    text = has_tokenizer(request.folder)
    server = Server(arguments(request, text=text), threads=request.threads)
    try:
        return ServedEngine(
            server, request.folder, slots=request.slots, max_len=request.max_len, dtype=request.dtype,
            version=request.version, text=text, verify=request.verify,
        )  # fmt: skip
    except BaseException:
        server.close()
        raise


def arguments(request: LoadRequest, *, text: bool = True) -> dict[str, Any]:
    """SGLang's arguments for a model on a CPU."""
    context = request.max_len + _MARGIN
    return {
        "model_path": request.folder,
        "skip_tokenizer_init": not text,
        "device": "cpu",
        "dtype": request.dtype,
        "context_length": context,
        "max_running_requests": request.slots,
        "max_total_tokens": cache_tokens(request.folder, request.dtype, context, request.slots),
        "weight_version": str(request.version),
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        "incremental_streaming_output": True,
        "enable_custom_logit_processor": True,
        "constrained_json_disable_any_whitespace": True,  # a sample could be spaces up to its limit
        "log_level": "error",
    }


def cache_tokens(folder: str, dtype: str, context: int, slots: int) -> int:
    """Tokens whose keys and values fit in memory: those of all slots, or as many as the limit
    allows, but of one sample at least."""
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    heads = config.get("num_attention_heads") or 1
    size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    layers = config.get("num_hidden_layers") or 1
    one = 2 * layers * (config.get("num_key_value_heads") or heads) * max(size, 1) * getattr(torch, dtype).itemsize
    return max(2 * context, min(slots * context, _CACHE_BYTES // one))
