"""What every objective has and gives."""

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
class Machine:
    """What computes: the models, and the numbers that outlive a step."""

    policy: Policy
    algorithm: Algorithm
    temperature: float
    """What completions were sampled with, above 0."""
    tokens: int
    """Most positions of a micro-batch."""
    seed: int
    reference: Reference | None = None
    critic: Critic | None = None
    teacher: Teacher | None = None
    """Absent where samples carry the teacher's logprobs themselves."""
    kl_coefficient: float = 0.0
    cache: ReferenceCache = field(default_factory=ReferenceCache)
    ranks: Ranks = ALONE
    """Who computes with this machine: it must be asked for the same on each."""

    def pack(self, samples: Sequence[TrainSample], chosen: Sequence[int], whole: Sequence[int] | None = None) -> list[MicroBatch]:
        """``packing.pack`` with this machine's settings."""
        return pack(
            samples, chosen, tokens=self.tokens, share_prefixes=self.policy.share_prefixes, whole=whole, ranks=self.ranks.size
        )

    @torch.no_grad()
    def totals(self, samples: Sequence[TrainSample], *, reference: bool = False) -> Tensor:
        """float64 [S]: the sum of each sample's trained logprobs under the policy, or the reference; 0 for one without."""
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
    """Tokens (pairs, samples) that the sums are over."""
    sums: Mapping[str, Tensor]
    """Metric -> scalar without gradient."""


class Objective(Protocol):
    """One step's work. Made from the samples in their order; raises ``BadBatch`` where they don't fit."""

    metrics: dict[str, float]
    """What is known before the first update."""

    def __init__(self, machine: Machine, samples: Sequence[TrainSample], step: int) -> None: ...

    def updates(self) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each optimizer update, in turn."""
        ...

    def part(self, batch: MicroBatch) -> Part:
        """The loss of a micro-batch of the update in hand."""
        ...

    def advantages(self) -> Mapping[tuple[str, int], float]:
        """(group_key, sample) -> advantage, over a sample's tokens the mean; empty where there are none."""
        ...


def sequence_sums(batch: MicroBatch, logprobs: Tensor, count: int) -> Tensor:
    """float32 [count], with gradient: logprobs float32 [N] of a micro-batch summed over each sample of the whole batch: in
    float64, as the reference's, since what is trained on is the small difference of the two."""
    sums = logprobs.new_zeros(count, dtype=torch.float64)
    return sums.index_add_(0, torch.from_numpy(batch.sample).to(logprobs.device), logprobs.double()).float()


def trained_lengths(samples: Sequence[TrainSample]) -> Tensor:
    """int64 [S]: trained tokens of each sample."""
    return torch.tensor([int(np.count_nonzero(sample.loss_mask[1:])) for sample in samples])
