"""Proximal Policy Optimization with a critic.

Schulman et al., arXiv 1707.06347; for language models Ouyang et al., arXiv 2203.02155.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rollout_workers.algorithms.advantage import add_at_end, whiten
from rollout_workers.algorithms.family import penalties, policy_algorithm
from rollout_workers.algorithms.surrogate import PolicyConfig, one_of, present
from rollout_workers.algorithms.types import Algorithm, Estimate, EstimatorBatch, LossTerms, ValueBatch


@dataclass(frozen=True, slots=True)
class PpoConfig(PolicyConfig):
    """Settings of PPO."""

    kl_coefficient: float = 0.05
    kl_estimator: str = "k1"
    kl_in: str = "reward"
    epochs: int = 4
    gamma: float = 1.0
    """Discount of later rewards per token."""
    gae_lambda: float = 0.95
    """GAE's lambda: 0 uses only the critic's values for later rewards, 1 only the sampled
    return."""
    value_clip: float = 0.2
    """Clip range of a value around its estimate before the first update; 0 disables clipping."""
    value_coefficient: float = 0.1
    """Weight of the value loss relative to the policy loss."""
    whiten_advantages: bool = True
    """Whether advantages are normalised over the tokens of the batch."""
    critic: str = "head"
    """``head``: a scalar head on the policy's own last hidden states. ``network``: a separate
    model."""
    critic_learning_rate: float = 1e-5
    """Peak learning rate of a critic ``network``."""
    critic_warmup_steps: int = 0
    """First steps that train the critic ``network`` alone, on samples of the initial policy (value
    pretraining, VC-PPO, arXiv 2503.01491, section 3.2)."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)
        one_of("critic", self.critic, ("head", "network"))
        if self.critic_warmup_steps and self.critic == "head":
            raise ValueError("critic_warmup_steps needs critic 'network': a head has the optimizer of the policy")


def ppo(config: PpoConfig) -> Algorithm:
    """PPO as an algorithm: ``surrogate.policy_loss``, advantages and returns from ``estimate``, and
    ``value_loss``."""
    algorithm = policy_algorithm("ppo", config, estimate=partial(estimate, config=config), critic=True)
    return replace(algorithm, value_loss=partial(value_loss, config=config), critic_warmup_steps=config.critic_warmup_steps)


def estimate(batch: EstimatorBatch, *, config: PpoConfig) -> Estimate:
    """Generalized advantages and the critic's targets.

    The reward of a token is its token reward, if any, minus ``kl_coefficient`` times its divergence
    if the divergence is part of the reward. The sample's reward is added at its last token. Returns
    are ``advantage + value`` before the advantages are whitened.

    float64 [S] rewards; float64 [T] token rewards, logprobs and values. Mask: the tokens are those
    that carry loss; the reward of a sample without tokens is lost. Returns float64 [T] advantages
    and returns. Raises ``ValueError`` if the batch lacks an input.
    """
    metrics: dict[str, float] = {}
    per_token = batch.rewards.new_zeros(batch.sample.shape) if batch.token_rewards is None else batch.token_rewards
    if config.kl_in_reward:
        per_token = per_token - penalties(batch, config, metrics)
    values = present(batch.values, "the critic's values")
    advantages = gae(
        add_at_end(per_token, batch.rewards, batch.sample),
        values,
        batch.sample,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )
    returns = advantages + values
    return Estimate(advantages=whiten(advantages) if config.whiten_advantages else advantages, returns=returns, metrics=metrics)


def gae(rewards: Tensor, values: Tensor, sample: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438, equation 16).

    ``A_t = sum over l of (gamma lambda)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l})``, within a sample;
    after its last token the value is 0. Tokens between two trained ones (a tool's answer) are not
    there: the next trained token follows at once. rewards, values: float64 [T]. sample: int64 [T],
    ascending. Returns float64 [T].
    """
    out = torch.empty_like(values)
    reward, value, ids = rewards.tolist(), values.tolist(), sample.tolist()
    running = following = 0.0
    for place in range(len(ids) - 1, -1, -1):
        if place + 1 < len(ids) and ids[place] != ids[place + 1]:
            running = following = 0.0
        running = reward[place] + gamma * following - value[place] + gamma * gae_lambda * running
        following = value[place]
        out[place] = running
    return out


def value_loss(batch: ValueBatch, *, config: PpoConfig) -> LossTerms:
    """``value_coefficient * max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2``, the mean
    over the batch's tokens.

    float32 [N] each. Mask: the tokens are those that carry loss. Reduction: the sum over
    ``normalizer``, the tokens of the whole batch. Sums: ``value/loss`` (without the coefficient),
    ``value/clip_fraction`` (tokens without gradient), ``value/mean``, ``value/error`` (absolute).
    """
    error = (batch.values - batch.returns).square()
    sums = {"value/mean": batch.values.sum(), "value/error": (batch.values - batch.returns).abs().sum()}
    if config.value_clip > 0:
        low, high = batch.old_values - config.value_clip, batch.old_values + config.value_clip
        bounded = (torch.minimum(torch.maximum(batch.values, low), high) - batch.returns).square()
        sums["value/clip_fraction"] = (bounded > error).float().sum()
        error = torch.maximum(error, bounded)
    half = error / 2
    sums["value/loss"] = half.sum()
    loss = config.value_coefficient * half.sum() / batch.normalizer
    return LossTerms(loss=loss, sums={name: value.detach() for name, value in sums.items()})
