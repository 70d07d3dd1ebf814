"""Tensors as messages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollout.tensor.v1 import tensor_pb2
from rollout_workers.multistep.errors import BatchInvalid
from rollout_workers.weights.naming import dtype_name, dtype_of


def to_message(tensor: Tensor) -> tensor_pb2.Tensor:
    """A tensor on the CPU as a message."""
    raw = tensor.detach().contiguous()
    data = raw.view(torch.uint8) if raw.dim() else raw.reshape(1).view(torch.uint8)
    return tensor_pb2.Tensor(dtype=dtype_name(raw.dtype), shape=raw.shape, data=data.numpy().tobytes())


def from_message(message: tensor_pb2.Tensor) -> Tensor:
    """The tensor of a message, a copy. Raises :class:`BatchInvalid` if its parts don't fit."""
    dtype = dtype_of(message.dtype)
    wanted = int(np.prod(list(message.shape), dtype=np.int64)) * (dtype.itemsize if dtype else 0)
    if dtype is None or wanted != len(message.data):
        raise BatchInvalid(f"a tensor of {message.dtype} {list(message.shape)} has {len(message.data)} bytes, not {wanted}")
    if not message.data:
        return torch.empty(list(message.shape), dtype=dtype)
    return torch.frombuffer(bytearray(message.data), dtype=dtype).reshape(list(message.shape))
