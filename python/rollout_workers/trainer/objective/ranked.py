"""Losses over pairs that the policy sampled itself: online DPO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rollout_workers.trainer.objective.base import Machine
from rollout_workers.trainer.objective.preference import Preferences
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.types import BadBatch, TrainSample


class Ranked(Preferences):
    """One step over the best and the worst sample of each group. ``groups/equal_rewards`` counts those that make no pair."""

    def __init__(self, machine: Machine, samples: Sequence[TrainSample], step: int) -> None:
        chosen = ranked(samples)
        super().__init__(machine, chosen, step)
        self.metrics["groups/equal_rewards"] = float(len({sample.group_key for sample in samples}) - len(chosen) // 2)

    def updates(self) -> Iterator[list[MicroBatch]]:
        """One update; of nothing where no group makes a pair."""
        if not self._pairs:
            yield []
            return
        yield from super().updates()

    def _totals(self) -> Tensor:
        """Computed anew: no sample comes back."""
        if not self._samples:
            return torch.zeros(0, dtype=torch.float64)
        return self._machine.totals(self._samples, reference=True)


def ranked(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Of each group, in order, the first sample of the highest reward, then the first of the lowest; none where all are equal.

    A sample without a trained token is no candidate. Raises ``BadBatch`` for a reward that is infinite or not a number.
    """
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        if not math.isfinite(sample.reward):
            raise BadBatch("a reward is infinite or not a number; such a sample must be excluded, never trained on")
        if sample.loss_mask[1:].any():
            groups.setdefault(sample.group_key, []).append(sample)
    pairs: list[TrainSample] = []
    for group in groups.values():
        best, worst = max(group, key=lambda s: s.reward), min(group, key=lambda s: s.reward)
        if best.reward > worst.reward:
            pairs += [best, worst]
    return pairs
