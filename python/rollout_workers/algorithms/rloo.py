"""RLOO: REINFORCE Leave-One-Out (Ahmadian et al., "Back to Basics", arXiv 2402.14740)."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_workers.algorithms.grpo import GrpoConfig, compare
from rollout_workers.algorithms.types import Algorithm


@dataclass(frozen=True, slots=True)
class RlooConfig(GrpoConfig):
    """GRPO's settings with the defaults of RLOO. ``kl_coefficient`` is the paper's for TL;DR
    summarisation."""

    baseline: str = "leave_one_out"
    normalization: str = "none"
    kl_coefficient: float = 0.03
    kl_estimator: str = "k1"
    kl_in: str = "reward"
    reduction: str = "sequence"
    importance_level: str = "sequence"


def rloo(config: RlooConfig) -> Algorithm:
    """RLOO as an algorithm.

    A whole completion is one action: the ratio is that of the sample, the product over its tokens,
    and the loss the mean over samples. On policy the gradient is ``A grad(log p(completion))``,
    REINFORCE with the mean of the other samples as its baseline. Off policy the importance weight
    is that of the completion, too, once for all its tokens (``importance_level = "sequence"``).
    """
    return compare("rloo", config, ratio="product")
