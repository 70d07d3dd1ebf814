"""Safetensors files without a copy: written straight from the tensors' memory, read as views of the
mapped file.

The library's ``save_file`` syncs the file, ``save`` copies every tensor twice, and ``safe_open``
takes 50 us a tensor: for a small model, which gets new weights several times a second, that was
most of their delivery. The format is a length, a JSON header and the bytes of the tensors
(https://github.com/huggingface/safetensors#format); each side reads what the other writes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
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
    """Write contiguous CPU tensors (any shape) as ``path``, not synced. An existing file is
    overwritten in place, to use memory reserved for it. Raises ``ValueError`` for an unsupported
    dtype, ``OSError`` for a failed write."""
    header, order = _header(tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()))
    pieces = [memoryview(header), *(piece for name in order if (piece := raw_bytes(tensors[name])))]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = sum(map(len, pieces))
        while pieces:  # one call writes at most 2 GiB and some thousand pieces
            written = os.writev(file, pieces[:_MOST_PIECES])
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if written:
                pieces[0] = pieces[0][written:]
        os.ftruncate(file, size)
    finally:
        os.close(file)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, as copy-on-write views of its pages, which stay valid after
    the file is deleted. Raises ``OSError``, and ``ValueError`` if the file is not a complete
    safetensors file."""
    with open(path, "rb") as file:
        try:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:
            raise ValueError("the file is empty") from None
    size = struct.unpack_from("<Q", pages)[0] if len(pages) >= 8 else 0
    if not 2 <= size <= min(len(pages) - 8, _LARGEST_HEADER):
        raise ValueError(f"not a safetensors file: it has {len(pages)} bytes, and its header claims to have {size}")
    layout, end = _layout(pages[8 : 8 + size])
    if 8 + size + end != len(pages):
        raise ValueError(f"the file has {len(pages)} bytes, but the header describes {8 + size + end}")
    return {
        name: torch.frombuffer(pages, dtype=dtype, count=count, offset=8 + size + start).view(shape)
        if count
        else torch.empty(shape, dtype=dtype)
        for name, dtype, shape, count, start in layout
    }


def file_layout(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int], int]:
    """The header of a file for tensors (name, dtype, shape), where each begins in the file, and the
    size of the file. Raises ``ValueError`` for an unsupported dtype."""
    header, _ = _header(tuple(tensors))
    entries, end = _layout(header[8:])
    return header, {name: len(header) + start for name, _, _, _, start in entries}, len(header) + end


_MOST_PIECES = 1024
_LARGEST_HEADER = 100 << 20  # the limit of the safetensors library
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


@lru_cache(maxsize=4)  # each version of a run's weights has the same header
def _layout(header: bytes) -> tuple[tuple[tuple[str, torch.dtype, tuple[int, ...], int, int], ...], int]:
    """Name, dtype, shape, element count, and first byte of each tensor, and the end of the last
    one. Raises ``ValueError``."""
    entries = []
    end = 0
    try:
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            dtype, shape, (start, stop) = _BY_NAME[entry["dtype"]], tuple(map(int, entry["shape"])), entry["data_offsets"]
            count = math.prod(shape)
            if min(shape, default=0) < 0 or start < 0 or stop - start != count * dtype.itemsize:
                raise ValueError(
                    f"tensor {name}: bytes {start} to {stop} do not fit dtype {entry['dtype']} and shape {list(shape)}"
                )
            entries.append((name, dtype, shape, count, start))
            end = max(end, stop)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the header is not a safetensors header: {error!r}") from error
    return tuple(entries), end


@lru_cache(maxsize=4)
def _header(layout: _Layout) -> tuple[bytes, tuple[str, ...]]:
    """The header, and the order of the tensors: widest elements first, so that all are aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    ordered = sorted(layout, key=lambda entry: (-entry[1].itemsize, entry[0]))
    for name, dtype, shape in ordered:
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name}: dtype {dtype} is not supported; use one of {', '.join(_DTYPES.values())}")
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, tuple(name for name, _, _ in ordered)
