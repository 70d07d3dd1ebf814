"""Indices of the trained tokens of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.types import TrainSample


class TokenIndex:
    """The T trained tokens of S samples, ordered by sample and position. The first token of a
    sample is never trained."""

    def __init__(self, samples: Sequence[TrainSample]) -> None:
        lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
        self._starts = np.cumsum(lengths) - lengths
        trained = np.concatenate([sample.loss_mask for sample in samples]).astype(bool)
        trained[self._starts[lengths > 0]] = False
        self._trained = trained
        self._ranks = np.cumsum(trained) - 1
        ends = np.concatenate(([0], np.cumsum(trained)))
        self.counts: NDArray[np.int64] = ends[self._starts + lengths] - ends[self._starts]
        """int64 [S]: the number of trained tokens of each sample."""
        self.sample = torch.from_numpy(np.repeat(np.arange(len(samples)), self.counts))
        """int64 [T], ascending: the sample of each token."""

    @property
    def size(self) -> int:
        """T."""
        return len(self.sample)

    def of(self, batch: MicroBatch) -> Tensor:
        """int64 [N]: the index among the T of each token of a micro-batch that was packed from the
        same samples."""
        return torch.from_numpy(self._ranks[self._starts[batch.sample] + batch.place])

    def gather(self, arrays: Sequence[NDArray[np.float32]]) -> Tensor:
        """float64 [T]: the trained tokens' values of one array [length] per sample."""
        return torch.from_numpy(np.concatenate(list(arrays))[self._trained]).double()
