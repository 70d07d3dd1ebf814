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
_BOUND = (
    "The ratio of a token is held within exp(±20), as verl's is, and k3 goes on along its tangent from exp(20); TRL's have no "
    "bound, and its gradient of a completion's ratio is no number where float32 overflows."
)
_K3 = (
    "verl holds k3 at 10, where its gradient vanishes: it lets go of a policy that is far from the reference. Ours goes on "
    "pulling."
)
_DISTILLATION = "verl's loss is -A log p; ours is -A p / p_old, whose value is the divergence itself. The gradients agree."

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
    """Largest difference of an element, relative to the wanted element where that is above 1; infinite where one of either is
    not a number. An element beside a huge one is held to the same bar."""
    if found.shape != wanted.shape or not bool(found.isfinite().all() and wanted.isfinite().all()):
        return torch.inf
    if not wanted.numel():
        return 0.0
    exact = wanted.double()
    return float(((found.double() - exact).abs() / exact.abs().clamp(min=1)).max())
