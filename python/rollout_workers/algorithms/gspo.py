"""GSPO: Group Sequence Policy Optimization (Zheng et al., arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_workers.algorithms.grpo import GrpoConfig, compare
from rollout_workers.algorithms.types import Algorithm


@dataclass(frozen=True, slots=True)
class GspoConfig(GrpoConfig):
    """GRPO's settings with the defaults of GSPO: the ratio of a sample varies less than that of a
    token, so the clip range is narrower."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    reduction: str = "sequence"
    minibatches: int = 4


def gspo(config: GspoConfig) -> Algorithm:
    """GSPO as an algorithm.

    The ratio is that of the sample, by its length:
    ``s = exp(mean over its tokens of log(p / p_old))`` (equation 7), the same for all its tokens,
    so a sample is clipped as a whole. Its gradient reaches every token of the sample.
    """
    return compare("gspo", config, ratio="mean")
