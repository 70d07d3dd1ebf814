"""Losses over preference pairs: DPO, IPO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rollout_workers.algorithms import PairBatch
from rollout_workers.trainer.objective.base import Models, Part, sequence_sums, trained_lengths
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.types import BadBatch, TrainSample


class Preferences:
    """One step over pairs: sample 0 of a group is chosen, sample 1 rejected.

    A pair is one term of the loss, so it is in one micro-batch, and its prompt is computed once.
    The reference's sums are computed once per pair and cached.
    """

    def __init__(self, models: Models, samples: Sequence[TrainSample], step: int) -> None:
        self._models, self._samples = models, samples
        self._pairs = pairs_of(samples, step)
        self._lengths = trained_lengths(samples)
        self._reference = self._totals().float()
        self.metrics: dict[str, float] = {"pairs": float(len(self._pairs)), "tokens/trained": float(self._lengths.sum())}

    def _totals(self) -> Tensor:
        """float64 [S]: the sums of the reference's logprobs."""
        return self._models.cache.totals(self._models, self._samples)

    def updates(self) -> Iterator[list[MicroBatch]]:
        """One update."""
        yield self._models.pack(self._samples, range(len(self._samples)), [index // 2 for index in range(len(self._samples))])

    def advantages(self) -> Mapping[tuple[str, int], float]:
        """Empty: nothing was sampled."""
        return {}

    def part(self, batch: MicroBatch) -> Part:
        """The loss of the micro-batch's pairs."""
        policy = self._models.policy.logprobs(batch, temperature=self._models.temperature)
        sums = sequence_sums(batch, policy.tokens, len(self._samples))
        chosen = torch.from_numpy(np.unique(batch.sample // 2)) * 2
        device = sums.device
        terms = self._models.algorithm.loss(
            PairBatch(
                chosen=sums[chosen],
                rejected=sums[chosen + 1],
                reference_chosen=self._reference[chosen].to(device),
                reference_rejected=self._reference[chosen + 1].to(device),
                chosen_lengths=self._lengths[chosen].to(device),
                rejected_lengths=self._lengths[chosen + 1].to(device),
                pairs=float(len(self._pairs)),
            )
        )
        return Part(terms.loss, len(chosen), terms.sums)


def pairs_of(samples: Sequence[TrainSample], step: int) -> list[tuple[TrainSample, TrainSample]]:
    """The ordered samples as pairs. Raises ``BadBatch`` if a sample has no counterpart or no
    trained token."""
    if len(samples) % 2:
        raise BadBatch(f"step {step}: {len(samples)} samples cannot be paired")
    pairs = list(zip(samples[::2], samples[1::2], strict=True))
    for chosen, rejected in pairs:
        if chosen.group_key != rejected.group_key:
            raise BadBatch(f"step {step}: group {chosen.group_key} is not a pair of a chosen and a rejected completion")
        for sample in (chosen, rejected):
            if not sample.loss_mask[1:].any():
                raise BadBatch(f"step {step}: sample {sample.sample} of group {sample.group_key} has no token to train on")
    return pairs
