"""CISPO: clipped importance-sampling weights (MiniMax-M1, arXiv 2506.13585, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_workers.algorithms.grpo import GrpoConfig, compare
from rollout_workers.algorithms.types import Algorithm


@dataclass(frozen=True, slots=True)
class CispoConfig(GrpoConfig):
    """GRPO's settings with the defaults of CISPO.

    The paper sets no lower clip and doesn't name the upper one; 5 in all is what ScaleRL (arXiv
    2510.13786) found to do well.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0
    old_policy: str = "engine"


def cispo(config: CispoConfig) -> Algorithm:
    """CISPO as an algorithm.

    The loss of a token is ``-constant(clip(r)) A log(p)`` (equation 4). The clip limits the weight
    of a token's gradient but never removes it, so rare tokens that decide a chain of thought are
    still trained. The clipped ratio is itself an importance weight, of the trained policy against
    the one that sampled (equation 4; ScaleRL's truncated importance sampling), so off policy its
    denominator is the engine's policy (``old_policy = "engine"``).
    """
    return compare("cispo", config, detach_ratio=True)
