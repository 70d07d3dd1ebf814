"""Deliberate differences from the oracles, and the distance between two results."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .batches import CASES

GOLDEN = Path(__file__).parent / "golden.safetensors"

_EMPTY_RLOO = (
    "TRL adds the constant -A, which has no gradient, for a completion without tokens. Ours adds nothing. The gradients agree."
)
_PRODUCT = (
    "TRL does not bound the ratio of a whole completion. Ours is clamped to exp(20), because float32 overflows soon after that "
    "and the step would be refused."
)
_EMPTY_GSPO = (
    "verl divides by the number of completions with tokens. Ours divides by all sampled completions, like TRL, so that the parts "
    "of a batch add up."
)
_BOUND = (
    "The ratio of a token is clamped to exp(±20), like verl's, and k3 is linear beyond exp(20). TRL has no bounds, and its "
    "gradient of a completion's ratio is NaN where float32 overflows."
)
_K3 = (
    "verl clamps k3 to 10, where the gradient becomes 0, so a policy far from the reference is no longer pulled back. Ours keeps "
    "a gradient."
)
_DISTILLATION = "verl's loss is -A log p; ours is -A p / p_old, whose value equals the divergence. The gradients agree."

_UNBOUNDED = ["grpo/token", "grpo/token kl", "grpo/token entropy", "grpo/sequence", "grpo/sequence kl", "dapo", "dr_grpo"]
PARTS = ("loss", "gradient")

DIFFERENCES: dict[tuple[str, str, str], str] = {
    ("trl/rloo", "empty completions", "loss"): _EMPTY_RLOO,
    ("trl/rloo", "huge ratios", "loss"): _PRODUCT,
    ("trl/rloo", "huge ratios", "gradient"): _PRODUCT,
    ("verl/gspo", "empty completions", "loss"): _EMPTY_GSPO,
    ("verl/gspo", "empty completions", "gradient"): _EMPTY_GSPO,
    **{("verl/kl/k3", case, part): _K3 for case in ("far reference", "all far off", "out of bounds") for part in PARTS},
    **{(f"trl/{what}", "out of bounds", part): _BOUND for what in _UNBOUNDED for part in PARTS},
    ("trl/rloo", "out of bounds", "gradient"): _BOUND,
    **{("verl/distillation", case, "loss"): _DISTILLATION for case in CASES},
}
"""(loss, case, ``loss`` or ``gradient``) -> the reason."""


def distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference of an element, relative if the wanted element is above 1; infinite if any
    element of either tensor is not finite. Each element is compared on its own, so large elements
    do not hide small ones."""
    if found.shape != wanted.shape or not bool(found.isfinite().all() and wanted.isfinite().all()):
        return torch.inf
    if not wanted.numel():
        return 0.0
    exact = wanted.double()
    return float(((found.double() - exact).abs() / exact.abs().clamp(min=1)).max())
