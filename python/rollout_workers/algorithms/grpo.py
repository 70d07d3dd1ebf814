"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from rollout_workers.algorithms.advantage import NORMALIZATIONS, group_relative, leave_one_out
from rollout_workers.algorithms.family import group_algorithm
from rollout_workers.algorithms.surrogate import PolicyConfig, one_of
from rollout_workers.algorithms.types import Algorithm


@dataclass(frozen=True, slots=True)
class GrpoConfig(PolicyConfig):
    """Settings of GRPO, by the names of the run config; losses based on GRPO use other defaults."""

    normalization: str = "group"
    """Advantages are divided by the standard deviation of the rewards of the ``group`` or the
    ``batch``, or by ``none``."""
    baseline: str = "group"
    """Mean reward to subtract: of the whole ``group``, or of the other samples of the group
    (``leave_one_out``)."""
    normalize_std: bool = True
    """False sets ``normalization`` to ``none``."""
    dynamic_sampling: bool = False
    """Whether groups with equal rewards are excluded from the batch. They would only dilute its
    mean."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)
        one_of("normalization", self.normalization, NORMALIZATIONS)
        one_of("baseline", self.baseline, ("group", "leave_one_out"))
        if not self.normalize_std:
            object.__setattr__(self, "normalization", "none")


def grpo(config: GrpoConfig) -> Algorithm:
    """GRPO as an algorithm.

    The loss is ``surrogate.policy_loss``, by default with token-level normalisation over the global
    batch (DAPO, arXiv 2503.14476, equation 8), which doesn't favour short right answers as the
    paper's own (``reduction = "sequence"``) does.
    """
    return compare("grpo", config)


def compare(name: str, config: GrpoConfig, *, ratio: str = "token", detach_ratio: bool = False) -> Algorithm:
    """An algorithm of GRPO's family: its estimator by ``baseline`` and ``normalization``, and
    ``surrogate.policy_loss``."""
    estimator = leave_one_out if config.baseline == "leave_one_out" else group_relative
    algorithm = group_algorithm(
        name,
        config,
        partial(estimator, normalization=config.normalization),
        normalize_std=config.normalization != "none",
        ratio=ratio,
        detach_ratio=detach_ratio,
    )
    return replace(algorithm, drop_equal_groups=config.dynamic_sampling)
