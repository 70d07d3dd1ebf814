"""Direct Preference Optimization (Rafailov et al., arXiv 2305.18290)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn.functional import logsigmoid

from rollout_workers.algorithms.types import Algorithm, LossTerms, Needs, PairBatch


@dataclass(frozen=True, slots=True)
class DpoConfig:
    """Settings of DPO, by the names of the run config."""

    beta: float = 0.1
    """Strength of the pull toward the initial model."""
    label_smoothing: float = 0.0
    """Assumed fraction of pairs with wrong labels (conservative DPO), in [0, 0.5)."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta {self.beta} must be above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing {self.label_smoothing} must be in [0, 0.5)")


def dpo(config: DpoConfig) -> Algorithm:
    """DPO as an algorithm."""
    return Algorithm(name="dpo", needs=Needs(reference=True), loss=partial(dpo_loss, config=config), family="pairs")


def dpo_loss(batch: PairBatch, *, config: DpoConfig) -> LossTerms:
    """``-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)``, the mean over pairs (equation 7;
    with smoothing e: Mitchell 2023).

    ``m`` is the margin of the log-ratios to the initial model, chosen less rejected, summed over
    tokens.

    float32 [P] each. Mask: the sums are over tokens that carry loss. Reduction: the sum over
    ``pairs``, those of the whole batch. Sums: see ``margin_sums``.
    """
    chosen = batch.chosen - batch.reference_chosen
    rejected = batch.rejected - batch.reference_rejected
    logits = config.beta * (chosen - rejected)
    smoothing = config.label_smoothing
    per_pair = -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)
    return LossTerms(loss=per_pair.sum() / batch.pairs, sums=margin_sums(batch, config.beta))


_ROUNDING = 2e-6  # per token, and relative to the sum of logprobs; smaller margins are rounding errors


def margin_sums(batch: PairBatch, beta: float) -> dict[str, Tensor]:
    """Sums over pairs of the implicit rewards: ``rewards/chosen``, ``rewards/rejected``,
    ``rewards/margin``, and ``rewards/accuracy`` (pairs whose chosen reward is higher by more than
    the rounding error, so a policy equal to its reference has accuracy 0).

    float32 [P] each -> float32 scalar each, without gradient. Mask: as the loss's. Reduction: sums
    over the pairs given.
    """
    ratios = (batch.chosen - batch.reference_chosen).detach(), (batch.rejected - batch.reference_rejected).detach()
    sums, tokens = batch.reference_chosen.abs() + batch.reference_rejected.abs(), batch.chosen_lengths + batch.rejected_lengths
    rounding = _ROUNDING * (sums + tokens)
    chosen, rejected = beta * ratios[0], beta * ratios[1]
    return {
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/margin": (chosen - rejected).sum(),
        "rewards/accuracy": (ratios[0] - ratios[1] > rounding).float().sum(),
    }
