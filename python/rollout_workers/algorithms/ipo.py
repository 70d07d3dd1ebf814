"""Identity Preference Optimization (Azar et al., arXiv 2310.12036)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rollout_workers.algorithms.dpo import margin_sums
from rollout_workers.algorithms.types import Algorithm, LossTerms, Needs, PairBatch


@dataclass(frozen=True, slots=True)
class IpoConfig:
    """Settings of IPO, by the names of the run config."""

    beta: float = 0.1
    """The paper's tau: the target margin is ``1 / (2 beta)``."""
    length_normalize: bool = True
    """Whether log-ratios are means over the completion's tokens, as in the authors' experiments, or
    sums."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta {self.beta} must be above 0")


def ipo(config: IpoConfig) -> Algorithm:
    """IPO as an algorithm."""
    return Algorithm(name="ipo", needs=Needs(reference=True), loss=partial(ipo_loss, config=config), family="pairs")


def ipo_loss(batch: PairBatch, *, config: IpoConfig) -> LossTerms:
    """``(m - 1 / (2 beta))^2``, the mean over pairs (equation 17), with m the margin of log-ratios
    to the initial model.

    float32 [P] each; lengths int64 [P], an empty completion counting as one token. Mask: sums and
    lengths are of tokens that carry loss. Reduction: the sum over ``pairs``, those of the whole
    batch. Sums: see ``dpo.margin_sums``.
    """
    chosen = batch.chosen - batch.reference_chosen
    rejected = batch.rejected - batch.reference_rejected
    if config.length_normalize:
        chosen = chosen / batch.chosen_lengths.clamp(min=1)
        rejected = rejected / batch.rejected_lengths.clamp(min=1)
    per_pair = (chosen - rejected - 1 / (2 * config.beta)).square()
    return LossTerms(loss=per_pair.sum() / batch.pairs, sums=margin_sums(batch, config.beta))
