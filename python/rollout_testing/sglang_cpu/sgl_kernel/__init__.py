"""A stand-in for ``sgl_kernel`` on CPUs, whose wheel contains only CUDA kernels.

SGLang imports this package on every platform. Without AMX its layers use plain PyTorch, and the
functions here are the only ones that they need in addition. ``make engine-sglang`` installs it into
the environment of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Write the places of new tokens into the table of each request: for row i the next ``end -
    start`` values of ``out_cache_loc``."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not part of the stand-in for CPUs; use plain PyTorch layers")

    return missing


if not torch.cuda.is_available():
    _device_module = torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        """The CPU's module by default. Without this, SGLang fails when it releases memory."""
        return torch.cpu if device is None else _device_module(device)

    torch.get_device_module = get_device_module
