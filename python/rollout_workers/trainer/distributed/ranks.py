"""The ranks of one learner: processes that hold a part of each tensor and compute a part of each
batch.

Each rank has the whole batch and makes the same decisions; only forward and backward passes are
distributed. ``Ranks`` is a single rank, ``fsdp.Group`` several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rollout_workers.trainer.packing import MicroBatch

T = TypeVar("T")
Inside = Callable[..., Any]
"""``inside(work, *arguments)`` is ``work(*arguments)`` with the tensors of a model gathered."""


class Ranks:
    """A single rank."""

    rank = 0
    size = 1
    saving: Any = None
    """The process group that writes states, next to calls of the others; None for a single rank."""

    @property
    def loading_device(self) -> str:
        """The device that models are loaded on before ``shard``."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def shard(self, module: nn.Module, fill: Callable[[], None] | None = None) -> Inside:
        """Keep this rank's part of a Hugging Face model, or of a module that contains one. fill: if
        it is on the meta device, gives its tensors their values, after it has memory for its part.
        """
        return _directly

    def deal(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        """This rank's micro-batches; each rank gets as many. False marks a duplicate that another
        rank counts."""
        for start in range(0, len(batches), self.size):
            mine = start + self.rank
            yield batches[mine if mine < len(batches) else start], mine < len(batches)

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """This rank's part of the gradient of the summed losses of all ranks, for each of
        ``parameters``."""
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks in rank order. Every rank must call it."""
        return [value]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace CPU tensors by their sums over the ranks, with the same bits on each. Every rank
        must call it."""


def _directly(work: Callable[..., T], *arguments: Any) -> T:
    return work(*arguments)


ALONE = Ranks()
