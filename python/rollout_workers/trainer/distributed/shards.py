"""Tensors that may be sharded by rows over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, which are live; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All rows of a sharded tensor, on the CPU; every rank must call it. Any other tensor
    unchanged."""
    return _full(tensor).cpu() if isinstance(tensor, DTensor) else tensor


def sharded_like(rows: Tensor, tensor: Tensor) -> Tensor:
    """``rows`` as this rank's part of a tensor that is sharded like ``tensor``; unchanged if that
    is not sharded."""
    if not isinstance(tensor, DTensor):
        return rows
    return DTensor.from_local(
        rows, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def assign(live: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, or this rank's rows of it, into a live tensor."""
    if not isinstance(live, DTensor):
        live.copy_(value)
        return
    rows = value.chunk(live.device_mesh.size())  # like fully_shard: equal parts, then a shorter one, then none
    rank = live.device_mesh.get_local_rank()
    if rank < len(rows):
        live.to_local().copy_(rows[rank])


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block the parameters of a module are gathered, plain tensors. Changes to
    them are discarded."""
    sharded = [(part, name, p) for part in module.modules() for name, p in part._parameters.items() if isinstance(p, DTensor)]
    for part, name, parameter in sharded:
        part._parameters[name] = nn.Parameter(_full(parameter), requires_grad=False)
    try:
        yield
    finally:
        for part, name, parameter in sharded:
            part._parameters[name] = parameter


def _full(tensor: DTensor) -> Tensor:
    with torch.no_grad():
        return tensor.full_tensor()
