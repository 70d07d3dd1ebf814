"""Encodes the items of channels as bytes, and reads them again.

An item is a tree of dicts, lists, and tuples whose leaves are tensors, NumPy arrays, texts, bytes,
numbers, booleans, and ``None``. Tensors have the encoding that they have in trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from rollout.tensor.v1 import exchange_pb2 as pb
from rollout_workers.multistep.errors import BatchInvalid
from rollout_workers.multistep.tensors import from_message, to_message
from rollout_workers.weights.naming import DTYPE_NAMES

MOST_LEVELS = 32
_NAMES = ", ".join(DTYPE_NAMES.values())
_INT64 = range(-(1 << 63), 1 << 63)


def encode_item(item: Any) -> bytes:
    """An item as bytes. Tensors are taken to the CPU, and scalars of NumPy become Python's. Raises
    :class:`BatchInvalid` with the place of a value that no message can have."""
    value = pb.Value()
    _write(value, item, "item", MOST_LEVELS)
    return value.SerializeToString()


def decode_item(data: bytes) -> Any:
    """The item of ``encode_item``; its tensors are copies. Raises :class:`BatchInvalid`."""
    try:
        return _read(pb.Value.FromString(data))
    except DecodeError as error:
        raise BatchInvalid(f"{len(data)} bytes are not an item: {error}") from error


def _write(value: pb.Value, item: Any, where: str, levels: int) -> None:
    if not levels:
        raise BatchInvalid(f"`{where}` is nested in more than {MOST_LEVELS} levels")
    if isinstance(item, np.generic):
        item = item.item()
    if item is None:
        return
    if isinstance(item, Tensor):
        value.tensor.CopyFrom(to_message(_known(item, where).cpu()))
    elif isinstance(item, np.ndarray):
        value.array.CopyFrom(to_message(_of_array(item, where)))
    elif isinstance(item, bool):
        value.flag = item
    elif isinstance(item, int):
        value.integer = _integer(item, where)
    elif isinstance(item, float):
        value.number = item
    elif isinstance(item, str):
        value.text = item
    elif isinstance(item, bytes):
        value.data = item
    elif isinstance(item, (list, tuple)):
        target = value.list if isinstance(item, list) else value.tuple
        target.SetInParent()
        for place, one in enumerate(item):
            _write(target.values.add(), one, f"{where}[{place}]", levels - 1)
    elif isinstance(item, Mapping):
        value.dict.SetInParent()
        for key, one in item.items():
            entry = value.dict.entries.add()
            if isinstance(key, str):
                entry.text = key
            elif isinstance(key, (int, np.integer)) and not isinstance(key, bool):
                entry.integer = _integer(int(key), where)
            else:
                raise BatchInvalid(f"`{where}` has a key {key!r}, not a text or an integer")
            _write(entry.value, one, f"{where}.{key}", levels - 1)
    else:
        raise BatchInvalid(f"`{where}` is a {type(item).__name__}", fix="send tensors, arrays, texts, numbers, lists, and dicts")


def _known(tensor: Tensor, where: str) -> Tensor:
    if tensor.dtype not in DTYPE_NAMES:
        raise BatchInvalid(f"`{where}` has the dtype {tensor.dtype}", fix=f"send one of {_NAMES}")
    return tensor


def _of_array(array: np.ndarray[Any, Any], where: str) -> Tensor:
    native = array.astype(array.dtype.newbyteorder("="), copy=True)
    try:
        return _known(torch.from_numpy(native), where)
    except TypeError as error:
        raise BatchInvalid(f"`{where}` has the dtype {array.dtype}", fix=f"send one of {_NAMES}") from error


def _integer(value: int, where: str) -> int:
    if value not in _INT64:
        raise BatchInvalid(f"`{where}` has the integer {value}, which 64 bits can't hold")
    return value


def _read(value: pb.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind is None:
        return None
    if kind == "tensor":
        return from_message(value.tensor)
    if kind == "array":
        return from_message(value.array).numpy()
    if kind == "list":
        return [_read(one) for one in value.list.values]
    if kind == "tuple":
        return tuple(_read(one) for one in value.tuple.values)
    if kind == "dict":
        return {
            entry.integer if entry.WhichOneof("key") == "integer" else entry.text: _read(entry.value)
            for entry in value.dict.entries
        }
    return getattr(value, kind)
