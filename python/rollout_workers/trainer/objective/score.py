"""Losses over scores: reward models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from rollout_workers.algorithms import ScoreBatch
from rollout_workers.trainer.model.scorer import Scorer
from rollout_workers.trainer.objective.base import Models, Part
from rollout_workers.trainer.objective.preference import pairs_of
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.types import TrainSample


class Scores:
    """One step over pairs: sample 0 is chosen, and its reward is the margin if the data has one;
    sample 1 is rejected."""

    def __init__(self, models: Models, samples: Sequence[TrainSample], step: int) -> None:
        assert isinstance(models.policy, Scorer)
        self._models, self._scorer = models, models.policy
        self._pairs = pairs_of(samples, step)
        self._samples = [ending(sample) for sample in samples]
        margins = torch.tensor([chosen.reward for chosen, _ in self._pairs])
        self._margins = margins.float() if bool(margins.any()) else None
        self.metrics: dict[str, float] = {"pairs": float(len(self._pairs))}

    def updates(self) -> Iterator[list[MicroBatch]]:
        """One update."""
        yield self._models.pack(self._samples, range(len(self._samples)), [index // 2 for index in range(len(self._samples))])

    def advantages(self) -> Mapping[tuple[str, int], float]:
        """Empty: nothing was sampled."""
        return {}

    def part(self, batch: MicroBatch) -> Part:
        """The loss of the micro-batch's pairs."""
        found = self._scorer.scores(batch)
        scores = found.new_zeros(len(self._samples)).index_add_(0, torch.from_numpy(batch.sample).to(found.device), found)
        chosen = torch.from_numpy(np.unique(batch.sample // 2)) * 2
        margins = None if self._margins is None else self._margins[chosen // 2].to(scores.device)
        terms = self._models.algorithm.loss(
            ScoreBatch(chosen=scores[chosen], rejected=scores[chosen + 1], pairs=float(len(self._pairs)), margins=margins)
        )
        return Part(terms.loss, len(chosen), terms.sums)


def ending(sample: TrainSample) -> TrainSample:
    """The sample with an appended token, the only trained one. The position that predicts it is the
    last token, whose state is scored."""
    size = len(sample.token_ids)
    mask = np.zeros(size + 1, np.uint8)
    mask[-1] = 1
    return dataclasses.replace(
        sample,
        token_ids=np.append(sample.token_ids, np.int32(0)).astype(np.int32),
        loss_mask=mask,
        logprobs=np.zeros(size + 1, np.float32),
    )
