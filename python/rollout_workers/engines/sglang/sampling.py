"""Translates sampling parameters into those of SGLang. Imports neither torch nor SGLang."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rollout_workers.engines.base import Constraint, SamplingParams

PENALTIES = "rollout_penalties"
"""Key of ``custom_params`` that the logits processor reads."""
_SIGNED = 1 << 63


def engine_params(
    params: SamplingParams, seed: int, *, room: int, prompt: int, continued: int = 0, end_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """SGLang's ``sampling_params`` of one sample.

    Every request gets a seed, because SGLang's default is the same for all of them. Stop strings
    are found by this engine, which knows their text. room: most tokens that the context leaves
    after the prompt and the ``continued`` tokens. prompt: tokens of the prompt. end_ids: of the
    model.
    """
    found: dict[str, Any] = {
        "max_new_tokens": min(params.max_tokens - continued, room),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "ignore_eos": params.ignore_eos,
        "sampling_seed": signed(seed),
        "stop_token_ids": list(params.stop_token_ids) or None,
    }
    if params.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.constraint is not None:
        found |= constraint(params.constraint)
    if needs_penalties(params):
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else end_ids)}
        found["custom_params"] = {
            PENALTIES: json.dumps(
                {
                    "prompt": prompt,
                    "repetition": params.repetition_penalty,
                    "presence": params.presence_penalty,
                    "frequency": params.frequency_penalty,
                    "min_tokens": params.min_tokens,
                    "ends": sorted(ends),
                }
            )
        }
    return found


def signed(seed: int) -> int:
    """The 64 bits of a seed as a signed integer, which SGLang stores."""
    return (seed + _SIGNED) % (1 << 64) - _SIGNED


def needs_penalties(params: SamplingParams) -> bool:
    """Whether logits depend on the tokens before. SGLang's own penalties forget the tokens from
    before a pause, and its repetition penalty ignores the prompt."""
    return (
        params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0 or params.min_tokens > 0
    )


def constraint(wanted: Constraint) -> dict[str, str]:
    """The parameter of SGLang for what the text must match."""
    if wanted.kind == "json_schema":
        return {"json_schema": wanted.value}
    if wanted.kind == "json_object":
        return {"json_schema": json.dumps({"type": "object"})}
    if wanted.kind == "regex":
        return {"regex": wanted.value}
    if wanted.kind == "grammar":
        return {"ebnf": wanted.value}
    return {"regex": "(" + "|".join(re.escape(choice) for choice in json.loads(wanted.value)) + ")"}
