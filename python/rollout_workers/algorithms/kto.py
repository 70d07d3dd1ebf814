"""Kahneman-Tversky Optimization (Ethayarajh et al., arXiv 2402.01306): each completion has a label;
no pairs are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rollout_workers.algorithms.types import Algorithm, LossTerms, Needs, UnpairedBatch


@dataclass(frozen=True, slots=True)
class KtoConfig:
    """Settings of KTO, by the names of the run config."""

    beta: float = 0.1
    """Strength of the pull toward the initial model."""
    desirable_weight: float = 1.0
    """Weight of desirable completions."""
    undesirable_weight: float = 1.0
    """Weight of undesirable completions. The paper recommends ``desirable_weight * desirable``
    within 1 to 4/3 of its counterpart."""
    reference_point: bool = True
    """Whether gains are relative to the divergence of the policy. If false, they are relative to 0,
    which saves a forward pass (APO-zero, unpaired)."""
    paired: bool = False
    """Whether the rows are pairs. The loss ignores it: a pair is one desirable and one undesirable
    completion."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta {self.beta} must be above 0")
        if self.desirable_weight < 0 or self.undesirable_weight < 0:
            raise ValueError("desirable_weight and undesirable_weight must not be below 0")


def kto(config: KtoConfig) -> Algorithm:
    """KTO as an algorithm."""
    needs = Needs(reference=True, mismatched=config.reference_point)
    return Algorithm(name="kto", needs=needs, loss=partial(kto_loss, config=config), family="unpaired")


def kto_loss(batch: UnpairedBatch, *, config: KtoConfig) -> LossTerms:
    """``w (1 - sigmoid(beta (m - z)))`` for a desirable completion,
    ``w (1 - sigmoid(beta (z - m)))`` for another; the mean over samples (equation 8).

    ``m`` is the log-ratio to the initial model summed over tokens, ``z`` the reference point, a
    constant for the gradient. float32 [S], bool [S]. Mask: the sums are over tokens that carry
    loss. Reduction: the sum over ``samples``, those of the whole batch. Sums: ``rewards/chosen``,
    ``rewards/rejected`` (0 for the other kind), ``desirable`` (their number),
    ``kl/reference_point``.
    """
    log_ratio = batch.logprobs - batch.reference_logprobs
    gain = log_ratio - batch.reference_point
    per_sample = torch.where(
        batch.desirable,
        config.desirable_weight * torch.sigmoid(-config.beta * gain),
        config.undesirable_weight * torch.sigmoid(config.beta * gain),
    )
    rewards = config.beta * log_ratio.detach()
    sums = {
        "rewards/chosen": rewards[batch.desirable].sum(),
        "rewards/rejected": rewards[~batch.desirable].sum(),
        "desirable": batch.desirable.float().sum(),
        "kl/reference_point": torch.full_like(rewards, batch.reference_point).sum(),
    }
    return LossTerms(loss=per_sample.sum() / batch.samples, sums=sums)


def mismatch(prompts: Sequence[object]) -> list[int]:
    """For each sample of a batch, the sample whose completion is put after its prompt: the nearest
    preceding one (cyclic) with another prompt; if all prompts are equal, the preceding one.

    Example: ``mismatch(["a", "b", "b", "c"])`` is ``[3, 0, 0, 2]``.
    """
    size = len(prompts)
    out: list[int] = []
    for place, prompt in enumerate(prompts):
        others = ((place - back) % size for back in range(1, size))
        out.append(next((other for other in others if prompts[other] != prompt), (place - 1) % size))
    return out


def reference_point(logprobs: Tensor, reference_logprobs: Tensor) -> float:
    """z0: the mean over the global batch of the log-ratio of mismatched completions, at least 0
    (section 4.1).

    logprobs, reference_logprobs: float32 [S], sums over tokens, under the policy and the initial
    model. 0 for no sample.
    """
    if not logprobs.numel():
        return 0.0
    return max(0.0, float((logprobs.detach() - reference_logprobs).mean()))
