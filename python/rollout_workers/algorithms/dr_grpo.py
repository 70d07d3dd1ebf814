"""Dr. GRPO: GRPO without its two biases (Liu et al., "Understanding R1-Zero-Like Training", arXiv
2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_workers.algorithms.grpo import GrpoConfig, compare
from rollout_workers.algorithms.types import Algorithm


@dataclass(frozen=True, slots=True)
class DrGrpoConfig(GrpoConfig):
    """GRPO's settings with the defaults of Dr. GRPO."""

    normalization: str = "none"
    reduction: str = "constant"
    max_tokens: int = 1


def dr_grpo(config: DrGrpoConfig) -> Algorithm:
    """Dr. GRPO as an algorithm.

    Advantages are ``r - mean`` (dividing by the standard deviation favours questions that are too
    easy or too hard), and the loss is summed over tokens and divided by ``samples * max_tokens``
    (dividing by a sample's own length favours long wrong answers).
    """
    return compare("dr_grpo", config)
