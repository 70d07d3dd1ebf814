"""Online DPO: preferences among the policy's own samples (Guo et al., arXiv 2402.04792)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rollout_workers.algorithms.dpo import DpoConfig, dpo_loss
from rollout_workers.algorithms.ipo import IpoConfig, ipo_loss
from rollout_workers.algorithms.surrogate import one_of
from rollout_workers.algorithms.types import Algorithm, Needs


@dataclass(frozen=True, slots=True)
class OnlineDpoConfig:
    """Settings of online DPO, by the names of the run config."""

    beta: float = 0.1
    """Strength of the pull toward the initial model."""
    loss: str = "sigmoid"
    """``sigmoid``: DPO's; ``ipo``: IPO's (arXiv 2310.12036), on sums over tokens."""
    dynamic_sampling: bool = False
    """Whether the buffer replaced groups without a pair by others. The loss ignores it."""

    def __post_init__(self) -> None:
        one_of("loss", self.loss, ("sigmoid", "ipo"))
        if self.beta <= 0:
            raise ValueError(f"beta {self.beta} must be above 0")


def online_dpo(config: OnlineDpoConfig) -> Algorithm:
    """Online DPO as an algorithm: the loss of DPO (or IPO) on the best and the worst sample of each
    group, by reward.

    The pairs are drawn by the learner (``objective.ranked``); a group whose rewards are all equal
    has none.
    """
    loss = partial(dpo_loss, config=DpoConfig(beta=config.beta))
    if config.loss == "ipo":
        loss = partial(ipo_loss, config=IpoConfig(beta=config.beta, length_normalize=False))
    return Algorithm(name="online_dpo", needs=Needs(sampled=True, group_rewards=True, reference=True), loss=loss, family="ranked")
