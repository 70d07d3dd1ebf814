"""The numbers of a step, by the names that the field uses.

| name | what |
|---|---|
| ``loss`` | the loss of the whole batch |
| ``reward/mean``, ``reward/std`` | over the batch's samples; std divides by their number |
| ``reward/NAME`` | mean of a metric that the reward returned, or of a part of it, over the samples that have it |
| ``zero_advantage_groups`` | share of groups none of whose samples has an advantage, as where all rewards are equal |
| ``entropy`` | nats, mean over trained tokens that were computed |
| ``kl/engine_learner`` | KL(engine || learner before the step's first update), k3, mean over the same tokens |
| ``kl/reference`` | KL(learner || initial model), the loss's estimator, over the same tokens; in the reward, of all trained |
| ``kl/coefficient`` | its weight in this step |
| ``kl/teacher`` | KL(learner || teacher), k1, over the same tokens |
| ``rewards/chosen``, ``rewards/rejected`` | (implicit) rewards of each kind, summed, over the pairs; KTO: over all samples |
| ``rewards/accuracy`` | share of pairs whose chosen completion has the higher reward |
| ``rewards/margin`` | mean reward of the chosen less that of the rejected; KTO: of batches with both kinds |
| ``desirable`` | KTO: share of desirable samples |
| ``clip_fraction`` | share of those tokens that the clip cuts off |
| ``grad_norm`` | before clipping |
| ``learning_rate`` | of this step |
| ``samples``, ``groups`` | in the batch |
| ``tokens`` | of the batch: prompts and completions |
| ``tokens/trained`` | those that carry loss: the normaliser |
| ``tokens/computed`` | positions that the forward pass worked on, after skipping and sharing, padding included |
| ``length/mean``, ``length/min``, ``length/max`` | of the completions, in tokens |
| ``staleness/max`` | steps between a sample's oldest weights and this step's |
| ``staleness/share_N`` | share of samples that are N steps behind, or up to the next N (0, 1, 2, 3, 5, 9); where any is |
| ``groups/equal_rewards`` | groups left out since their rewards are all equal, where the algorithm does so |
| ``tokens_per_second``, ``samples_per_second`` | of the batch, over ``time/step`` |
| ``time/pack`` | seconds before the first update: packing, and the passes without gradient that an algorithm wants first |
| ``time/forward``, ``time/backward``, ``time/optimizer``, ``time/step`` | seconds |
| ``updates`` | of the weights in this step, where there are several; ``loss`` and ``grad_norm`` are their means |
| ``refused`` | 1 where the gradient was refused and the step counts without it |

A mean over no token (every sample was skipped) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rollout_workers.algorithms.importance import staleness_histogram
from rollout_workers.trainer.types import TrainSample


def describe_batch(samples: Sequence[TrainSample], *, step: int, sampled: bool) -> dict[str, float]:
    """The metrics that samples alone decide. ``sampled``: they come from the policy, so rewards and versions count."""
    lengths = np.array([len(sample.token_ids) - sample.prompt_length for sample in samples])
    metrics = {
        "samples": float(len(samples)),
        "groups": float(len({sample.group_key for sample in samples})),
        "tokens": float(sum(len(sample.token_ids) for sample in samples)),
        "length/mean": float(lengths.mean()),
        "length/min": float(lengths.min()),
        "length/max": float(lengths.max()),
    }
    if sampled:
        rewards = np.array([sample.reward for sample in samples])
        metrics["reward/mean"] = float(rewards.mean())
        metrics["reward/std"] = float(rewards.std())
        metrics = _of_rewards(samples) | metrics
        behind = [step - 1 - sample.version for sample in samples]
        metrics["staleness/max"] = float(max(behind))
        if metrics["staleness/max"] > 0:
            metrics |= staleness_histogram(behind)
    return metrics


def _of_rewards(samples: Sequence[TrainSample]) -> dict[str, float]:
    """Means of what the reward returned beside itself."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.metrics.items():
            found.setdefault(f"reward/{name.removeprefix('reward/')}", []).append(value)
    return {name: float(np.mean(found[name])) for name in sorted(found)}


class TokenSums:
    """Sums over computed tokens, added up over micro-batches in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._tokens = 0

    def add(self, tokens: int, sums: Mapping[str, torch.Tensor]) -> None:
        """Add a micro-batch's sums over its ``tokens`` tokens."""
        self._tokens += tokens
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def merge(self, others: Sequence[TokenSums]) -> None:
        """Become the sum of several."""
        self._sums, self._tokens, parts = {}, 0, [(other._tokens, dict(other._sums)) for other in others]
        for tokens, sums in parts:
            self._tokens += tokens
            for name, value in sums.items():
                self._sums[name] = self._sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Mean of each over all tokens added; empty where there was none."""
        means = {name: value / self._tokens for name, value in self._sums.items()}
        return means | unpaired_margin(means)


def unpaired_margin(means: Mapping[str, float]) -> dict[str, float]:
    """``rewards/margin`` of labelled completions, whose two kinds are in no pairs; empty for others, and where a kind is missing.

    >>> unpaired_margin({"rewards/chosen": 0.3, "rewards/rejected": -0.1, "desirable": 0.75})
    {'rewards/margin': 0.8}
    """
    share = means.get("desirable", 0.0)
    if not 0 < share < 1:
        return {}
    return {"rewards/margin": means["rewards/chosen"] / share - means["rewards/rejected"] / (1 - share)}
