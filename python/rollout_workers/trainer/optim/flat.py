"""Many parameters as one vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollout_workers.trainer.distributed.shards import local


class Flat:
    """A vector of parameters with its master copy and gradient, float32 [n] each.

    The parameters become views of it. FSDP owns the storage of sharded parameters, so they are
    copied from and to it, and n counts only this rank's rows.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], weight_decay: float) -> None:
        self.named = named
        self.weight_decay = weight_decay
        self._values = torch.cat([rows.reshape(-1) for rows in self._local()])
        self.rounds = self._values.dtype.itemsize < 4
        """Whether the model's dtype is narrower than the master copy."""
        self.master = self._values.float() if self.rounds else self._values
        self.gradient = torch.zeros_like(self.master)
        self._sharded = any(isinstance(p, DTensor) for _, p in named)
        if self._sharded:
            self._values = self.master
        else:
            for (_, parameter), (_, view) in zip(named, self.views(self._values), strict=True):
                parameter.data = view

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's part of a vector [n], in the parameter's shape."""
        rows = self._local()
        for (name, _), part, like in zip(self.named, vector.split([r.numel() for r in rows]), rows, strict=True):
            yield name, part.view(like.shape)

    def publish(self) -> None:
        """Copy the master copy to the model."""
        if self._sharded:
            torch._foreach_copy_(self._local(), self._parts())  # pyright: ignore[reportPrivateImportUsage]
        elif self.rounds:
            self._values.copy_(self.master)

    def read(self) -> None:
        """Copy the model to the master copy, with the precision of the model's dtype."""
        if self._sharded:
            torch._foreach_copy_(self._parts(), self._local())  # pyright: ignore[reportPrivateImportUsage]
        elif self.rounds:
            self.master.copy_(self._values)

    def _parts(self) -> list[Tensor]:
        return [part for _, part in self.views(self.master)]

    def _local(self) -> list[Tensor]:
        """This rank's rows of each parameter; they are live."""
        return [local(parameter.detach()) for _, parameter in self.named]
