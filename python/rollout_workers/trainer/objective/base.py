"""The protocol of objectives, and the code that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rollout_workers.algorithms import Algorithm
from rollout_workers.trainer.distributed.ranks import ALONE, Ranks
from rollout_workers.trainer.model.critic import Critic
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.model.reference import Reference, ReferenceCache
from rollout_workers.trainer.model.teacher import Teacher
from rollout_workers.trainer.packing import MicroBatch, pack
from rollout_workers.trainer.types import TrainSample


@dataclass(slots=True)
class Models:
    """The models of a trainer, and the values that outlive a step."""

    policy: Policy
    algorithm: Algorithm
    temperature: float
    """The sampling temperature, above 0."""
    tokens: int
    """The maximum number of positions of a micro-batch."""
    seed: int
    reference: Reference | None = None
    critic: Critic | None = None
    teacher: Teacher | None = None
    """None if the samples have the teacher's logprobs."""
    kl_coefficient: float = 0.0
    cache: ReferenceCache = field(default_factory=ReferenceCache)
    ranks: Ranks = ALONE
    """All ranks must make the same calls."""

    def pack(self, samples: Sequence[TrainSample], chosen: Sequence[int], whole: Sequence[int] | None = None) -> list[MicroBatch]:
        """``packing.pack`` with these settings."""
        return pack(
            samples, chosen, tokens=self.tokens, share_prefixes=self.policy.share_prefixes, whole=whole, ranks=self.ranks.size
        )

    @torch.no_grad()
    def totals(self, samples: Sequence[TrainSample], *, reference: bool = False) -> Tensor:
        """float64 [S]: the sum of each sample's trained logprobs under the policy or the reference;
        0 without trained tokens."""
        sums = torch.zeros(len(samples), dtype=torch.float64)
        for batch, mine in self.ranks.deal(self.pack(samples, range(len(samples)))):
            if reference:
                assert self.reference is not None
                logprobs = self.reference.logprobs(batch, temperature=self.temperature)
            else:
                logprobs = self.policy.logprobs(batch, temperature=self.temperature).tokens
            if mine:
                sums.index_add_(0, torch.from_numpy(batch.sample), logprobs.double().cpu())
        self.ranks.add_up([sums])
        return sums


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch's part of the loss."""

    loss: Tensor
    """float32 scalar, with gradient."""
    count: int
    """The number of tokens, pairs, or samples in the sums."""
    sums: Mapping[str, Tensor]
    """Metric -> scalar without gradient."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Metric -> scalar without gradient: the largest value of a token."""
    shares: Mapping[str, tuple[Tensor, float]] = field(default_factory=dict)
    """``LossTerms.shares``."""


class Objective(Protocol):
    """The loss of one step. The constructor takes the ordered samples and raises ``BadBatch`` if
    they cannot be trained on."""

    metrics: dict[str, float]
    """The metrics that are known before the first update."""

    def __init__(self, models: Models, samples: Sequence[TrainSample], step: int) -> None: ...

    def updates(self) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each weight update, in order."""
        ...

    def part(self, batch: MicroBatch) -> Part:
        """The loss of a micro-batch of the current update."""
        ...

    def advantages(self) -> Mapping[tuple[str, int], float]:
        """(group_key, sample) -> mean advantage of the sample's tokens; empty if there are no
        advantages."""
        ...


def sequence_sums(batch: MicroBatch, logprobs: Tensor, count: int) -> Tensor:
    """float32 [count], with gradient: a micro-batch's logprobs, float32 [N], summed per sample of
    the batch.

    The sum is in float64, like the reference's, because the loss uses the small difference of both.
    """
    sums = logprobs.new_zeros(count, dtype=torch.float64)
    return sums.index_add_(0, torch.from_numpy(batch.sample).to(logprobs.device), logprobs.double()).float()


def trained_lengths(samples: Sequence[TrainSample]) -> Tensor:
    """int64 [S]: the number of trained tokens of each sample."""
    return torch.tensor([int(np.count_nonzero(sample.loss_mask[1:])) for sample in samples])
