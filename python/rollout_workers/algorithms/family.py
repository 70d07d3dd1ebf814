"""The parts that PPO and the GRPO family share besides the loss: rewards, needs, and the KL
controller."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rollout_workers.algorithms.advantage import process_relative
from rollout_workers.algorithms.divergence import ESTIMATORS, adapted_coefficient
from rollout_workers.algorithms.surrogate import PolicyConfig, policy_loss, present
from rollout_workers.algorithms.types import Algorithm, Estimate, EstimatorBatch, Needs, Updates

Advantages = Callable[[Tensor, Tensor], Tensor]


def group_algorithm(
    name: str,
    config: PolicyConfig,
    advantages: Advantages,
    *,
    normalize_std: bool,
    ratio: str = "token",
    detach_ratio: bool = False,
) -> Algorithm:
    """An algorithm that compares the samples of a group. See ``surrogate.policy_loss`` for
    ``ratio`` and ``detach_ratio``."""
    return policy_algorithm(
        name,
        config,
        estimate=partial(estimate_by_group, config=config, advantages=advantages, normalize_std=normalize_std),
        advantages=None if config.kl_in_reward else advantages,
        ratio=ratio,
        detach_ratio=detach_ratio,
        group_rewards=True,
    )


def policy_algorithm(
    name: str,
    config: PolicyConfig,
    *,
    estimate: Callable[[EstimatorBatch], Estimate],
    advantages: Advantages | None = None,
    ratio: str = "token",
    detach_ratio: bool = False,
    group_rewards: bool = False,
    critic: bool = False,
) -> Algorithm:
    """An algorithm over ``surrogate.policy_loss``."""
    updates = Updates(config.epochs, config.minibatches)
    uses_engine = config.weighs or config.masks_samples or (config.off_policy and config.old_policy == "engine")
    return Algorithm(
        name=name,
        needs=Needs(
            sampled=True,
            group_rewards=group_rewards,
            reference=config.kl_coefficient > 0,
            engine_logprobs=uses_engine,
            old_logprobs=updates.count > 1 or config.kl_in_reward,
            critic=critic,
            entropy=config.entropy_coefficient > 0,
            every_token=config.kl_in_loss or config.entropy_coefficient > 0 or critic,
        ),
        loss=partial(policy_loss, config=config, ratio=ratio, detach_ratio=detach_ratio),
        advantages=advantages,
        estimate=estimate,
        updates=updates,
        shape=_shape(config),
        mask_truncated=config.mask_truncated,
        initial_kl_coefficient=config.kl_coefficient,
        next_kl_coefficient=(
            partial(adapted_coefficient, target=config.kl_target, horizon=config.kl_horizon)
            if config.kl_coefficient > 0 and config.kl_target > 0
            else None
        ),
    )


def estimate_by_group(batch: EstimatorBatch, *, config: PolicyConfig, advantages: Advantages, normalize_std: bool) -> Estimate:
    """Advantages relative to the group, of every token.

    With the divergence in the reward, a sample's reward is first lowered by ``kl_coefficient``
    times its sum over the sample. With ``token_rewards`` the estimate is that of process
    supervision, ``advantage.process_relative``, whatever ``advantages`` is, and each process reward
    is lowered by the sum over its part of the sample.

    float64 [S] rewards and float64 [T] logprobs; ``advantages``: float64 [S], int64 [S] -> float64
    [S]. Mask: the tokens are those that carry loss; a sample without one counts in its group.
    Returns float64 [T] advantages.
    """
    metrics: dict[str, float] = {}
    rewards, token_rewards = batch.rewards, batch.token_rewards
    penalty = penalties(batch, config, metrics) if config.kl_in_reward else None
    if token_rewards is None:
        if penalty is not None:
            rewards = rewards.index_add(0, batch.sample, -penalty)
        return Estimate(advantages=advantages(rewards, batch.groups)[batch.sample], metrics=metrics)
    found = process_relative(token_rewards, rewards, batch.sample, batch.groups, normalize_std=normalize_std, penalty=penalty)
    return Estimate(advantages=found, metrics=metrics)


def penalties(batch: EstimatorBatch, config: PolicyConfig, metrics: dict[str, float]) -> Tensor:
    """``kl_coefficient`` times the divergence of each token; adds its mean to ``metrics``.

    ``logprobs`` and ``reference_logprobs`` float64 [T]. Mask: the tokens are those that carry loss.
    Returns float64 [T]. Raises ``ValueError`` if the batch lacks one of them.
    """
    old = present(batch.logprobs, "logprobs of the policy before the first update")
    reference = present(batch.reference_logprobs, "logprobs of the reference model")
    divergence = ESTIMATORS[config.kl_estimator](old, reference)
    if divergence.numel():
        metrics["kl/reference"] = float(divergence.mean())
    return (config.kl_coefficient if batch.kl_coefficient is None else batch.kl_coefficient) * divergence


def overlong(rewards: Tensor, lengths: Tensor, truncated: Tensor, *, config: PolicyConfig) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    With L the longest completion and C = overlong_share * L: nothing is subtracted up to L - C
    tokens, then ``overlong_penalty`` times ``(length - (L - C)) / C``, and the whole penalty at L
    and from truncated completions.

    rewards: float64 [S]. lengths: int64 [S], sampled tokens. truncated: bool [S]. Returns float64
    [S].
    """
    room = config.overlong_share * config.max_tokens
    over = ((lengths.to(rewards.dtype) - (config.max_tokens - room)) / room).clamp(0, 1)
    return rewards - config.overlong_penalty * torch.where(truncated, torch.ones_like(over), over)


def _shape(config: PolicyConfig) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    return partial(overlong, config=config) if config.overlong_share > 0 else None
