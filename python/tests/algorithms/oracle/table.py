"""Where we differ from an oracle on purpose, and how far apart two answers are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .batches import CASES

GOLDEN = Path(__file__).parent / "golden.safetensors"

_EMPTY_RLOO = (
    "TRL counts -A for a completion without tokens, a constant without gradient; such a completion has no term here. The "
    "gradients agree."
)
_PRODUCT = (
    "TRL lets the ratio of a whole completion grow without bound; ours is held at exp(20), beyond which float32 soon "
    "overflows and a step would be refused."
)
_EMPTY_GSPO = (
    "verl divides by the completions that have tokens; ours by all that were sampled, as TRL does, so that a batch's parts "
    "add up."
)
_DISTILLATION = "verl's loss is -A log p; ours is -A p / p_old, whose value is the divergence itself. The gradients agree."

DIFFERENCES: dict[tuple[str, str, str], str] = {
    ("trl/rloo", "empty completions", "loss"): _EMPTY_RLOO,
    ("trl/rloo", "huge ratios", "loss"): _PRODUCT,
    ("trl/rloo", "huge ratios", "gradient"): _PRODUCT,
    ("verl/gspo", "empty completions", "loss"): _EMPTY_GSPO,
    ("verl/gspo", "empty completions", "gradient"): _EMPTY_GSPO,
    **{("verl/distillation", case, "loss"): _DISTILLATION for case in CASES},
}
"""(loss, case, ``loss`` or ``gradient``) -> the reason."""


def distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference of an element, by the largest element where that is above 1; infinite where one is not a number."""
    if found.shape != wanted.shape or not bool(found.isfinite().all()):
        return torch.inf
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    return float((found.double() - wanted.double()).abs().max()) / scale if wanted.numel() else 0.0
