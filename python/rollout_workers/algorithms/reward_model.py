"""Reward models from preferences (Bradley-Terry; Ouyang et al., arXiv 2203.02155, equation 1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch.nn.functional import logsigmoid

from rollout_workers.algorithms.types import Algorithm, LossTerms, Needs, ScoreBatch


@dataclass(frozen=True, slots=True)
class RewardModelConfig:
    """Settings of a reward model, by the names of the run config."""

    centering_coefficient: float = 0.0
    """Weight of the pull of scores towards 0 (Eisenstein et al., arXiv 2312.09244, with 0.01); 0:
    they may drift together."""


def reward_model(config: RewardModelConfig) -> Algorithm:
    """A reward model as an algorithm."""
    return Algorithm(
        name="reward_model", needs=Needs(score_head=True), loss=partial(preference_loss, config=config), family="scores"
    )


def preference_loss(batch: ScoreBatch, *, config: RewardModelConfig) -> LossTerms:
    """``-log sigmoid(chosen - rejected - margin) + centering_coefficient (chosen + rejected)^2``,
    the mean over pairs.

    The margin, where the data has one, is Llama 2's (arXiv 2307.09288, equation 2).

    float32 [P] each. Mask: none; a score is read at the last token. Reduction: the sum over
    ``pairs``, those of the whole batch.
    Sums: ``rewards/chosen``, ``rewards/rejected``, ``rewards/margin``, ``rewards/accuracy``.
    """
    difference = batch.chosen - batch.rejected
    per_pair = -logsigmoid(difference if batch.margins is None else difference - batch.margins)
    if config.centering_coefficient:
        per_pair = per_pair + config.centering_coefficient * (batch.chosen + batch.rejected).square()
    sums = {
        "rewards/chosen": batch.chosen.sum(),
        "rewards/rejected": batch.rejected.sum(),
        "rewards/margin": difference.sum(),
        "rewards/accuracy": (difference > 0).float().sum(),
    }
    return LossTerms(loss=per_pair.sum() / batch.pairs, sums={name: value.detach() for name, value in sums.items()})
