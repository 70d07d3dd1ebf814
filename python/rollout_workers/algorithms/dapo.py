"""DAPO: Decoupled Clip and Dynamic Sampling Policy Optimization (Yu et al., arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_workers.algorithms.grpo import GrpoConfig, compare
from rollout_workers.algorithms.types import Algorithm


@dataclass(frozen=True, slots=True)
class DapoConfig(GrpoConfig):
    """GRPO's settings with the defaults of DAPO; each part has a setting that turns it off."""

    clip_high: float = 0.28
    dynamic_sampling: bool = True
    overlong_share: float = 0.2
    max_tokens: int = 1


def dapo(config: DapoConfig) -> Algorithm:
    """DAPO as an algorithm.

    Its four parts: ``clip_high`` above ``clip_low``; ``dynamic_sampling``, which replaces groups of
    equal rewards by other groups (done by the buffer's ledger before a batch is built; groups that
    become equal through the overlong penalty are excluded from the mean here);
    ``reduction = "token"``; and the soft overlong punishment (``overlong_share``,
    ``overlong_penalty``).
    """
    return compare("dapo", config)
