"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rollout_workers.algorithms.advantage import group_relative, leave_one_out
from rollout_workers.algorithms.family import Advantages, group_algorithm
from rollout_workers.algorithms.surrogate import PolicyConfig, one_of
from rollout_workers.algorithms.types import Algorithm


@dataclass(frozen=True, slots=True)
class GrpoConfig(PolicyConfig):
    """Settings of GRPO, by the names of the run config; the losses that follow from it take them with other defaults."""

    normalization: str = "group"
    baseline: str = "group"
    """What a reward is compared with: the mean of its ``group``, or of the other samples of it (``leave_one_out``)."""
    normalize_std: bool = True
    """Off: ``normalization`` is ``none``."""
    dynamic_sampling: bool = False
    """Whether groups of equal rewards are replaced by others before the batch is formed (by the buffer)."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)
        one_of("baseline", self.baseline, ("group", "leave_one_out"))
        if not self.normalize_std:
            object.__setattr__(self, "normalization", "none")


def grpo(config: GrpoConfig) -> Algorithm:
    """GRPO as an algorithm.

    The loss is ``surrogate.policy_loss``, by default with token-level normalisation over the global batch (DAPO, arXiv
    2503.14476, equation 8), which doesn't favour short right answers as the paper's own (``reduction = "sequence"``) does.
    """
    return group_algorithm("grpo", config, compare(config))


def compare(config: GrpoConfig) -> Advantages:
    """The estimator of the settings: (rewards float64 [S], groups int64 [S]) -> float64 [S]."""
    if config.baseline == "leave_one_out":
        return partial(leave_one_out, normalization=config.normalization)
    return partial(group_relative, normalization=config.normalization)
