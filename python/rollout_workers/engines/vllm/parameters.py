"""Sampling parameters as vLLM's fields, for the engine in the worker and for a server. Imports
neither torch nor vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollout_workers.engines.base import Constraint, SamplingParams
from rollout_workers.engines.vllm.seeds import token_seed


def parameters_of(
    params: SamplingParams, *, seed: int, max_tokens: int, stop_ids: Sequence[int], continued: Sequence[int] = ()
) -> dict[str, Any]:
    """The fields for one sample but its constraint. continued: the tokens that an earlier request
    sampled, which vLLM gets as a part of the prompt; ``ContinuedPenalties`` counts them."""
    before = len(continued)
    penalties: dict[str, Any] = {
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }
    extra = None
    if before and (params.presence_penalty or params.frequency_penalty):
        extra, penalties = {"continued": list(continued), **penalties}, {}
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": token_seed(seed, before),
        "max_tokens": max_tokens,
        "min_tokens": min(max(0, params.min_tokens - before), max_tokens),
        "stop_token_ids": list(dict.fromkeys(stop_ids)),
        "ignore_eos": True,  # stop_ids has the end tokens
        "logprobs": params.top_logprobs,
        "logit_bias": dict(params.logit_bias) or None,
        "detokenize": False,
        "extra_args": extra,
        **penalties,
    }


def constraint_of(constraint: Constraint) -> dict[str, Any]:
    """The fields of ``StructuredOutputsParams``."""
    kind, value = constraint.kind, constraint.value
    if kind == "json_object":
        return {"json_object": True}
    if kind == "choices":
        return {"choice": json.loads(value)}
    return {{"json_schema": "json", "regex": "regex", "grammar": "grammar"}[kind]: value}
