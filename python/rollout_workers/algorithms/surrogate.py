"""The policy-gradient loss that PPO and the GRPO family share; each has its own settings and
estimator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_workers.algorithms.divergence import ESTIMATORS
from rollout_workers.algorithms.importance import (
    CORRECTIONS,
    LEVELS,
    SAMPLE_MASKS,
    bounded_exp,
    importance_weights,
    trusted_samples,
)
from rollout_workers.algorithms.reduction import (
    REDUCTIONS,
    lengths_of,
    mean_over_sample,
    reduce_tokens,
    samples_of,
    sum_over_sample,
)
from rollout_workers.algorithms.types import LossTerms, TokenBatch, Updates


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Settings of a policy-gradient loss, by the names of the run config."""

    clip_low: float = 0.2
    """The probability ratio is clipped to at least ``1 - clip_low``."""
    clip_high: float = 0.2
    """The probability ratio is clipped to at most ``1 + clip_high``."""
    dual_clip: float = 0.0
    """For negative advantages, the maximum of a token's loss as a multiple of the advantage (arXiv
    1912.09729, with 3); 0: no limit."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the initial model; 0 needs no reference model."""
    kl_estimator: str = "k3"
    """``k1``, ``k2`` or ``k3``."""
    kl_in: str = "loss"
    """``loss``: a term of the loss. ``reward``: subtracted from the rewards before advantages are
    estimated."""
    kl_target: float = 0.0
    """Target of the divergence in nats per token, towards which the coefficient is adapted; 0: the
    coefficient is constant."""
    kl_horizon: float = 10_000.0
    """Samples over which the coefficient adapts."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    reduction: str = "token"
    """``token``, ``sequence`` or ``constant``; see ``reduction.reduce_tokens``."""
    epochs: int = 1
    """Passes over a batch."""
    minibatches: int = 1
    """Updates per pass."""
    overlong_share: float = 0.0
    """Last share of the longest completion over which the reward falls linearly (DAPO, arXiv
    2503.14476, equation 13)."""
    overlong_penalty: float = 1.0
    """The amount that is subtracted from the reward at the longest completion."""
    mask_truncated: bool = False
    """Whether truncated completions are excluded from the loss."""
    off_policy: bool = False
    """Whether the policy that sampled may differ from the learner's: by older weights, or by an
    engine with other arithmetic. If false, the loss does not use the engine's logprobs."""
    old_policy: str = "proximal"
    """The denominator of the ratio if ``off_policy``: ``proximal``, the learner before the batch's
    first update, with a separate importance weight; or ``engine``, the behavior policy, so that the
    clip limits the distance to it."""
    importance_correction: str = "truncate"
    """``truncate``, ``mask``, or ``none``; see ``importance.importance_weights``. Used if
    ``off_policy``."""
    importance_level: str = "token"
    """``token``, ``sequence`` or ``geometric``."""
    importance_cap: float = 2.0
    """Largest importance weight."""
    importance_floor: float = 0.5
    """The smallest importance weight that ``mask`` keeps."""
    importance_sample_mask: str = "none"
    """``sequence`` or ``geometric``: whether samples are left out by the ratio of all their tokens;
    see ``importance.trusted_samples``. Used if ``off_policy``, with either ``old_policy``."""
    importance_sample_cap: float = 2.0
    """Largest ratio of a sample that is kept."""
    importance_sample_floor: float = 0.0
    """Smallest ratio of a sample that is kept."""
    max_tokens: int = 0
    """Longest completion that may be sampled; ``constant`` and ``overlong_share`` need it."""

    def __post_init__(self) -> None:
        one_of("kl_estimator", self.kl_estimator, ESTIMATORS)
        one_of("kl_in", self.kl_in, ("loss", "reward"))
        one_of("reduction", self.reduction, REDUCTIONS)
        one_of("old_policy", self.old_policy, ("proximal", "engine"))
        one_of("importance_correction", self.importance_correction, CORRECTIONS)
        one_of("importance_level", self.importance_level, LEVELS)
        one_of("importance_sample_mask", self.importance_sample_mask, SAMPLE_MASKS)
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip} must be above 1, or 0 for no bound")
        if self.max_tokens < 1 and (self.reduction == "constant" or self.overlong_share > 0):
            raise ValueError("reduction 'constant' and overlong_share need max_tokens, the longest completion")
        Updates(self.epochs, self.minibatches)

    @property
    def weighs(self) -> bool:
        """Whether tokens have importance weights."""
        return self.off_policy and self.old_policy == "proximal" and self.importance_correction != "none"

    @property
    def masks_samples(self) -> bool:
        """Whether samples may be left out by their ratio to the policy that sampled."""
        return self.off_policy and self.importance_sample_mask != "none"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the divergence is a term of the loss."""
        return self.kl_coefficient > 0 and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the divergence is subtracted from the rewards."""
        return self.kl_coefficient > 0 and self.kl_in == "reward"


def policy_loss(tokens: TokenBatch, *, config: PolicyConfig, ratio: str = "token", detach_ratio: bool = False) -> LossTerms:
    """The loss of a micro-batch. Per token, with ``r = p / p_old`` and advantage ``A``::

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) * w + kl_coefficient * KL - entropy_coefficient * H

    reduced over the batch as ``config.reduction`` says. ``ratio``: of the ``token``, the geometric
    mean over its sample (``mean``, GSPO), or of the whole sample (``product``, RLOO). With
    ``detach_ratio`` the first term is ``-constant(clip(r)) A log(p)`` (CISPO). With one update a
    batch ``p_old`` is ``p`` itself: r is 1 in value and carries the gradient ``A grad(log p)``.
    ``w`` is 1, or, off policy, the importance weight of the proximal over the behaviour policy, and
    0 for the samples that ``importance_sample_mask`` leaves out. What a mask leaves out still
    counts in the normalizers, and has its KL and entropy terms.

    float32 [N] each, and the tokens' samples int64 [N]. Mask: the tokens are those that carry loss.
    Reduction: ``config.reduction``, over ``normalizer`` tokens or ``samples`` (``reduce_tokens``),
    also of KL and entropy.

    Sums, over tokens: ``clip_fraction`` (whose gradient the clip cuts off), ``kl/reference``,
    ``importance/weight``, ``importance/bounded`` (those that the correction changed), and
    ``importance/masked`` (those that a mask leaves out) where they apply. Shares, of samples:
    ``importance/masked_samples``. Raises ``ValueError`` where the batch lacks what ``needs``
    declared.
    """
    advantages = present(tokens.advantages, "advantages: the advantage of each token or of its sample")
    old = _old(tokens, config)
    r = bounded_exp(_log_ratio(tokens, old, ratio))
    clipped = r.clamp(1 - config.clip_low, 1 + config.clip_high)
    if detach_ratio:
        per_token = -clipped.detach() * advantages * tokens.logprobs
        cut = clipped != r
    else:
        cut = ((r < 1 - config.clip_low) & (advantages < 0)) | ((r > 1 + config.clip_high) & (advantages > 0))
        gain = torch.where(cut, clipped * advantages, r * advantages)  # their minimum, with all of its gradient at the clip
        if config.dual_clip:
            bound = config.dual_clip * advantages
            cut = cut | ((advantages < 0) & (gain < bound))
            gain = torch.where(advantages < 0, torch.maximum(gain, bound), gain)
        per_token = -gain
    sums = {"clip_fraction": cut.float().sum()}
    shares: dict[str, tuple[Tensor, float]] = {}
    masked: list[Tensor] = []  # bool [N] each
    if config.weighs:
        weights = _weights(tokens, old, config)
        per_token = per_token * weights
        sums |= {"importance/weight": weights.sum(), "importance/bounded": _bounded(weights, config).float().sum()}
        masked += [weights == 0] if config.importance_correction == "mask" else []
    if config.masks_samples:
        left_out = ~_trusted(tokens, config)
        per_token = per_token.masked_fill(left_out, 0.0)
        shares["importance/masked_samples"] = _samples(left_out, tokens)
        masked.append(left_out)
    if masked:
        sums["importance/masked"] = torch.stack(masked).any(0).float().sum()
    loss = reduce_tokens(per_token, tokens, how=config.reduction, length=config.max_tokens)
    if config.kl_in_loss:
        reference = present(tokens.reference_logprobs, "logprobs of the reference model")
        divergence = ESTIMATORS[config.kl_estimator](tokens.logprobs, reference)
        coefficient = config.kl_coefficient if tokens.kl_coefficient is None else tokens.kl_coefficient
        loss = loss + coefficient * reduce_tokens(divergence, tokens, how=config.reduction, length=config.max_tokens)
        sums["kl/reference"] = divergence.detach().sum()
    if config.entropy_coefficient > 0:
        entropy = present(tokens.entropy, "the entropy of each token's distribution")
        bonus = reduce_tokens(entropy, tokens, how=config.reduction, length=config.max_tokens)
        loss = loss - config.entropy_coefficient * bonus
    return LossTerms(loss=loss, sums={name: value.detach() for name, value in sums.items()}, shares=shares)


def present(tensor: Tensor | None, what: str) -> Tensor:
    """The tensor, or ``ValueError`` with the name of what is missing. float [N] -> float [N], or
    any other."""
    if tensor is None:
        raise ValueError(f"these settings need {what}; the batch has none")
    return tensor


def one_of(name: str, value: str, known: object) -> None:
    """Raise ``ValueError`` if ``value`` is not one of ``known``."""
    choices = [str(choice) for choice in known]  # type: ignore[attr-defined]
    if value not in choices:
        raise ValueError(f"{name} {value!r} is unknown; take one of {', '.join(choices)}")


def _old(tokens: TokenBatch, config: PolicyConfig) -> Tensor:
    """float [N], without gradient: logprobs of the policy in the denominator of the ratio."""
    if config.off_policy and config.old_policy == "engine":
        return present(tokens.engine_logprobs, "the engine's logprobs")
    return tokens.logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs


def _log_ratio(tokens: TokenBatch, old: Tensor, level: str) -> Tensor:
    """float [N], with gradient."""
    log_ratio = tokens.logprobs - old
    if level == "token":
        return log_ratio
    over_sample = mean_over_sample if level == "mean" else sum_over_sample
    return over_sample(log_ratio, samples_of(tokens))


def _weights(tokens: TokenBatch, old: Tensor, config: PolicyConfig) -> Tensor:
    return importance_weights(
        old,
        present(tokens.engine_logprobs, "the engine's logprobs"),
        tokens.sample,
        correction=config.importance_correction,
        level=config.importance_level,
        cap=config.importance_cap,
        floor=config.importance_floor,
    )


def _trusted(tokens: TokenBatch, config: PolicyConfig) -> Tensor:
    """bool [N]: tokens of the samples that the sample mask keeps."""
    return trusted_samples(
        tokens.logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs,
        present(tokens.engine_logprobs, "the engine's logprobs"),
        samples_of(tokens),
        level=config.importance_sample_mask,
        cap=config.importance_sample_cap,
        floor=config.importance_sample_floor,
    )


def _samples(chosen: Tensor, tokens: TokenBatch) -> tuple[Tensor, float]:
    """The number of chosen samples, and of all. chosen: bool [N], equal for all tokens of a
    sample."""
    sample = samples_of(tokens)
    return (chosen.float() / lengths_of(sample)).sum(), float(len(sample.unique()))


def _bounded(weights: Tensor, config: PolicyConfig) -> Tensor:
    """bool [N]: tokens whose weight differs from their ratio."""
    return weights == 0 if config.importance_correction == "mask" else weights >= config.importance_cap
