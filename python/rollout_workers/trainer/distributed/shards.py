"""Tensors of which each rank holds some rows, beside those that are whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor, the live ones; the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All rows of a sharded tensor, on the CPU, which every rank must ask for; any other tensor as it is."""
    return _full(tensor).cpu() if isinstance(tensor, DTensor) else tensor


def sharded_like(rows: Tensor, tensor: Tensor) -> Tensor:
    """This rank's ``rows`` as a part of a tensor that is sharded as ``tensor`` is; the rows themselves where it is not."""
    if not isinstance(tensor, DTensor):
        return rows
    return DTensor.from_local(
        rows, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def assign(live: Tensor, value: Tensor) -> None:
    """Give a live tensor, sharded or not, the rows of a whole one that are its own."""
    if not isinstance(live, DTensor):
        live.copy_(value)
        return
    rows = value.chunk(live.device_mesh.size())  # as fully_shard cuts: equal parts, then a short one, then none
    rank = live.device_mesh.get_local_rank()
    if rank < len(rows):
        live.to_local().copy_(rows[rank])


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """While it is entered the parameters of a module are whole and plain; what is done to them is forgotten."""
    held = [(part, name, p) for part in module.modules() for name, p in part._parameters.items() if isinstance(p, DTensor)]
    for part, name, parameter in held:
        part._parameters[name] = nn.Parameter(_full(parameter), requires_grad=False)
    try:
        yield
    finally:
        for part, name, parameter in held:
            part._parameters[name] = parameter


def _full(tensor: DTensor) -> Tensor:
    with torch.no_grad():
        return tensor.full_tensor()
