"""Losses over pairs that the policy sampled itself: online DPO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rollout_workers.trainer.objective.base import Models
from rollout_workers.trainer.objective.preference import Preferences
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.types import TrainSample, check_rewards


class Ranked(Preferences):
    """One step over the best and the worst sample of each group. ``groups/equal_rewards`` counts
    groups without a pair."""

    def __init__(self, models: Models, samples: Sequence[TrainSample], step: int) -> None:
        chosen = ranked(samples)
        super().__init__(models, chosen, step)
        self.metrics["groups/equal_rewards"] = float(len({sample.group_key for sample in samples}) - len(chosen) // 2)

    def updates(self) -> Iterator[list[MicroBatch]]:
        """One update; an empty one if no group has a pair."""
        if not self._pairs:
            yield []
            return
        yield from super().updates()

    def _totals(self) -> Tensor:
        """As in ``Preferences``, but not cached: sampled completions do not recur."""
        if not self._samples:
            return torch.zeros(0, dtype=torch.float64)
        return self._models.totals(self._samples, reference=True)


def ranked(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """For each group its first sample of the highest reward, then its first of the lowest; nothing
    if all rewards are equal.

    Samples without a trained token do not count. Raises ``BadBatch`` as ``check_rewards`` does.
    """
    check_rewards(samples)
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        if sample.loss_mask[1:].any():
            groups.setdefault(sample.group_key, []).append(sample)
    pairs: list[TrainSample] = []
    for group in groups.values():
        best, worst = max(group, key=lambda s: s.reward), min(group, key=lambda s: s.reward)
        if best.reward > worst.reward:
            pairs += [best, worst]
    return pairs
