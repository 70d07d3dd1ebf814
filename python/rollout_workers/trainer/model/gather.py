"""Gathers rows of a tensor, with a backward pass that adds in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Gather:
    """Indices of m rows of a tensor [n, ...], and for each of the n rows the places where it was
    used, for its gradient."""

    taken: Tensor
    """int64 [m]."""
    places: Tensor
    """int64 [k], k <= m: indices into ``taken``, ordered by row. Padding is not in it and has no
    gradient."""
    bags: Tensor
    """int64 [n]: where the places of each row begin."""

    @classmethod
    def of(cls, taken: Index, real: Index, rows: int, device: torch.device) -> Gather:
        """taken: int64 [m]. real: its indices that are not padding, ascending. rows: n."""
        order = real[np.argsort(taken[real], kind="stable")]
        bags = np.searchsorted(taken[order], np.arange(rows))
        return cls(*(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in (taken, order, bags)))

    def __call__(self, source: Tensor) -> Tensor:
        """source: [n, W] -> [m, W]."""
        return _Take.apply(source, self.taken, self.places, self.bags)  # type: ignore[no-any-return]


class _Take(torch.autograd.Function):
    """``source[taken]``; the backward pass adds the gradients of each row in order."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, taken: Tensor, places: Tensor, bags: Tensor) -> Tensor:
        ctx.save_for_backward(places, bags)
        return source.index_select(0, taken)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        places, bags = ctx.saved_tensors
        return functional.embedding_bag(places, grad.contiguous(), bags, mode="sum"), None, None, None
