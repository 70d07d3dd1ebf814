"""Creates small safetensors files without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import numpy as np

_NAMES = {"float64": "F64", "float32": "F32", "uint16": "BF16", "uint8": "U8", "uint64": "U64"}


def safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Like ``write_tensors``: wide elements first. uint16 arrays are bf16."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header, at = {}, 0
    for name in order:
        array = tensors[name]
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors[name].tobytes() for name in order)
