"""Sampling parameters and penalties in vLLM's terms."""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from rollout_workers.engines.base import SamplingParams
from rollout_workers.engines.vllm.parameters import constraint_of, parameters_of


def params_of(
    params: SamplingParams, *, seed: int, max_tokens: int, stop_ids: Sequence[int], continued: Sequence[int] = ()
) -> VllmParams:
    """vLLM's parameters for one sample. continued: the tokens that an earlier request sampled,
    which vLLM gets as a part of the prompt."""
    fields = parameters_of(params, seed=seed, max_tokens=max_tokens, stop_ids=stop_ids, continued=continued)
    constraint = None if params.constraint is None else StructuredOutputsParams(**constraint_of(params.constraint))
    return VllmParams(structured_outputs=constraint, **fields)


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
