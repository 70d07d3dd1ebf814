"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rollout_workers.algorithms.advantage import group_relative
from rollout_workers.algorithms.divergence import ESTIMATORS
from rollout_workers.algorithms.importance import truncated_weight
from rollout_workers.algorithms.types import Algorithm, LossTerms, Needs, TokenBatch


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """Settings of GRPO, by the names of the run config."""

    clip_low: float = 0.2
    """The probability ratio is clipped below at ``1 - clip_low``."""
    clip_high: float = 0.2
    """... and above at ``1 + clip_high`` (0.28 in DAPO, arXiv 2503.14476)."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the initial model; 0 needs no reference model."""
    kl_estimator: str = "k3"
    """``k1``, ``k2`` or ``k3``."""
    normalize_std: bool = True
    """Whether advantages are divided by the standard deviation of the group's rewards."""
    off_policy: bool = False
    """Whether samples may come from older weights; off, the engine's logprobs stay out of the loss."""
    importance_cap: float = 2.0
    """Cap of the importance weight against the engine's logprobs; used where ``off_policy``."""

    def __post_init__(self) -> None:
        if self.kl_estimator not in ESTIMATORS:
            raise ValueError(f"kl_estimator {self.kl_estimator!r} is unknown; take one of {', '.join(ESTIMATORS)}")


def grpo(config: GrpoConfig) -> Algorithm:
    """GRPO as an algorithm."""
    return Algorithm(
        name="grpo",
        needs=Needs(
            sampled=True,
            group_rewards=True,
            reference=config.kl_coefficient > 0,
            engine_logprobs=config.off_policy,
            every_token=config.kl_coefficient > 0,
        ),
        loss=partial(clipped_surrogate, config=config),
        advantages=partial(group_relative, normalize_std=config.normalize_std),
    )


def clipped_surrogate(tokens: TokenBatch, *, config: GrpoConfig) -> LossTerms:
    """GRPO's loss with token-level normalisation over the global batch (DAPO, arXiv 2503.14476, equation 8).

    Per token, with ratio ``r = p / p_old`` and advantage ``A``::

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) * w + kl_coefficient * KL(p || p_reference)

    summed and divided by the normaliser. With one update a batch ``p_old`` is ``p`` itself: r is 1 in value and carries the
    gradient ``A grad(log p)``. ``w`` is 1, or, off policy, the truncated importance weight of ``p_old`` over the engine's
    probability (decoupled proximal and behaviour policies: Hilton et al., arXiv 2110.00641).

    Sums: ``clip_fraction`` (tokens whose gradient the clip cuts off), ``kl/reference`` where there is a reference.
    Raises ``ValueError`` where the batch lacks what ``needs`` declared.
    """
    if tokens.advantages is None:
        raise ValueError("GRPO needs advantages: give the batch the advantage of each token's sample")
    old = tokens.logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    ratio = (tokens.logprobs - old).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    per_token = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    if config.off_policy:
        behaviour = _present(tokens.engine_logprobs, "the engine's logprobs")
        per_token = per_token * truncated_weight(old, behaviour, config.importance_cap)
    sums = {"clip_fraction": _cut_off(ratio, tokens.advantages, config).sum()}
    if config.kl_coefficient > 0:
        reference = _present(tokens.reference_logprobs, "logprobs of the reference model")
        divergence = ESTIMATORS[config.kl_estimator](tokens.logprobs, reference)
        per_token = per_token + config.kl_coefficient * divergence
        sums["kl/reference"] = divergence.detach().sum()
    return LossTerms(loss=per_token.sum() / tokens.normalizer, sums=sums)


def _cut_off(ratio: Tensor, advantages: Tensor, config: GrpoConfig) -> Tensor:
    """float32 [N]: 1 where the clipped term is the smaller one and the token has no gradient from the surrogate."""
    low = (ratio < 1 - config.clip_low) & (advantages < 0)
    high = (ratio > 1 + config.clip_high) & (advantages > 0)
    return (low | high).float()


def _present(logprobs: Tensor | None, what: str) -> Tensor:
    if logprobs is None:
        raise ValueError(f"GRPO with these settings needs {what}; the batch has none")
    return logprobs
