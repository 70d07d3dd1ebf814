"""Sampling parameters and penalties in vLLM's terms."""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from rollout_workers.engines.base import Constraint, SamplingParams
from rollout_workers.engines.vllm.seeds import token_seed


def params_of(
    params: SamplingParams, *, seed: int, max_tokens: int, stop_ids: Sequence[int], continued: Sequence[int] = ()
) -> VllmParams:
    """vLLM's parameters for one sample. continued: the tokens that an earlier request sampled,
    which vLLM gets as a part of the prompt."""
    penalties: dict[str, Any] = {
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }
    extra = None
    if continued and (params.presence_penalty or params.frequency_penalty):
        extra, penalties = {"continued": list(continued), **penalties}, {}
    return VllmParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=token_seed(seed, len(continued)),
        max_tokens=max_tokens,
        min_tokens=min(max(0, params.min_tokens - len(continued)), max_tokens),
        stop_token_ids=list(dict.fromkeys(stop_ids)),
        ignore_eos=True,  # stop_ids has the end tokens
        logprobs=params.top_logprobs,
        logit_bias=dict(params.logit_bias) or None,
        structured_outputs=None if params.constraint is None else _constraint(params.constraint),
        detokenize=False,
        extra_args=extra,
        **penalties,
    )


def _constraint(constraint: Constraint) -> StructuredOutputsParams:
    kind, value = constraint.kind, constraint.value
    if kind == "json_schema":
        return StructuredOutputsParams(json=value)
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "regex":
        return StructuredOutputsParams(regex=value)
    if kind == "grammar":
        return StructuredOutputsParams(grammar=value)
    return StructuredOutputsParams(choice=json.loads(value))


class ContinuedPenalties(AdapterLogitsProcessor):
    """Penalties of samples that continue an earlier one. vLLM's own count only what it sampled
    itself."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: VllmParams) -> Any:
        extra = params.extra_args or {}
        if "continued" not in extra:
            return None
        continued: list[int] = extra["continued"]
        repetition, presence, frequency = (extra[f"{name}_penalty"] for name in ("repetition", "presence", "frequency"))

        def penalize(prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
            seen = torch.tensor(sorted({*prompt_ids, *output_ids}), device=logits.device)
            of_seen = logits[seen]
            logits[seen] = torch.where(of_seen > 0, of_seen / repetition, of_seen * repetition)
            sampled = torch.tensor([*continued, *output_ids], device=logits.device)
            counts = torch.bincount(sampled, minlength=logits.shape[-1])
            return logits - frequency * counts - presence * (counts > 0)

        return penalize
