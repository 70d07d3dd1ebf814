"""Writing a safetensors file straight from the tensors' memory.

The library's ``save_file`` syncs the file, and ``save`` copies every tensor twice: for a small model, which gets new weights
several times a second, that was most of their delivery. The format is a length, a JSON header and the bytes of the tensors
(https://github.com/huggingface/safetensors#format); the library reads what is written here.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from rollout_workers.weights.digest import raw_bytes

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write contiguous CPU tensors (any shape) as ``path``, not synced. Raises ``ValueError`` for a dtype that can't travel,
    ``OSError`` for the disk."""
    header, order = _header(tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()))
    with open(path, "wb", buffering=0) as file:
        for data in (memoryview(header), *(raw_bytes(tensors[name]) for name in order)):
            written = 0
            while written < len(data):  # one call takes 2 GiB at most
                written += file.write(data[written:])


@lru_cache(maxsize=4)
def _header(layout: _Layout) -> tuple[bytes, tuple[str, ...]]:
    """What stands before the tensors, and the order of their bytes: wide elements first, so that each lies aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    ordered = sorted(layout, key=lambda entry: (-entry[1].itemsize, entry[0]))
    for name, dtype, shape in ordered:
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name}: dtype {dtype} can't travel; there are {', '.join(_DTYPES.values())}")
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, tuple(name for name, _, _ in ordered)
