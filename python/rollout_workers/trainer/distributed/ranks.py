"""The ranks of one learner: processes that hold a part of each tensor and compute a part of each batch.

All of them see the whole batch and make the same decisions on it; dealt out is what costs: the forward and backward passes.
This is one rank alone; ``sharding.Group`` is several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rollout_workers.trainer.packing import MicroBatch

T = TypeVar("T")
Inside = Callable[..., Any]
"""``inside(work, *arguments)`` is ``work(*arguments)``, with the tensors of a model whole while it works."""


class Ranks:
    """One rank, which shares with nobody."""

    rank = 0
    size = 1

    @property
    def loading_device(self) -> str:
        """Where models are loaded, before ``shard``."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def shard(self, module: nn.Module) -> Inside:
        """Keep this rank's part of a Hugging Face model, or of a module that has one in it."""
        return _directly

    def deal(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        """This rank's micro-batches in turn, all ranks as many. False: the work is another's too, and must not count twice."""
        for start in range(0, len(batches), self.size):
            mine = start + self.rank
            yield batches[mine if mine < len(batches) else start], mine < len(batches)

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradient of the sum of the ranks' losses, this rank's part of it for each of ``parameters``."""
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks, in their order. Every rank must call it."""
        return [value]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace CPU tensors by their sums over the ranks, the same bits on each. Every rank must call it."""


def _directly(work: Callable[..., T], *arguments: Any) -> T:
    return work(*arguments)


ALONE = Ranks()
