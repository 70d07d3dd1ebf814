"""REINFORCE++: token-level returns, normalised over the whole batch (Hu et al., arXiv
2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rollout_workers.algorithms.advantage import add_at_end, group_relative, sum_from_here, whiten
from rollout_workers.algorithms.family import penalties, policy_algorithm
from rollout_workers.algorithms.surrogate import PolicyConfig
from rollout_workers.algorithms.types import Algorithm, Estimate, EstimatorBatch


@dataclass(frozen=True, slots=True)
class ReinforcePpConfig(PolicyConfig):
    """Settings of REINFORCE++."""

    kl_coefficient: float = 0.01
    kl_estimator: str = "k1"
    kl_in: str = "reward"
    gamma: float = 1.0
    """Discount of later rewards per token."""
    group_baseline: bool = False
    """REINFORCE++-Baseline: subtracts the mean reward of the group before the batch is
    normalized."""


def reinforce_pp(config: ReinforcePpConfig) -> Algorithm:
    """REINFORCE++ as an algorithm: ``surrogate.policy_loss`` over advantages from ``estimate``."""
    return policy_algorithm(
        "reinforce_pp", config, estimate=partial(estimate, config=config), group_rewards=config.group_baseline
    )


def estimate(batch: EstimatorBatch, *, config: ReinforcePpConfig) -> Estimate:
    """Return to go of each token, whitened over all tokens of the batch (section 3.1).

    The reward of a token is its token reward, if any, minus ``kl_coefficient`` times its divergence
    if the divergence is part of the reward. The sample's reward is added at its last token. With
    ``group_baseline`` the sample's reward is relative to its group's mean; with ``gamma`` 1 it is
    the same at all tokens.

    float64 [S] rewards; float64 [T] token rewards and logprobs. Mask: the tokens are those that
    carry loss; the reward of a sample without tokens only counts in its group's mean. Returns
    float64 [T] advantages.
    """
    metrics: dict[str, float] = {}
    per_token = batch.rewards.new_zeros(batch.sample.shape) if batch.token_rewards is None else batch.token_rewards
    if config.kl_in_reward:
        per_token = per_token - penalties(batch, config, metrics)
    rewards = batch.rewards
    if config.group_baseline:
        rewards = group_relative(rewards, batch.groups, normalization="none")
    returns = sum_from_here(add_at_end(per_token, rewards, batch.sample), batch.sample, gamma=config.gamma)
    return Estimate(advantages=whiten(returns), metrics=metrics)
