"""The weights digest: a Merkle root over fixed row blocks of the tensors.

One policy, one root. The learner computes it from what it wrote, an engine from what it holds, and
a tensor-parallel rank can check the leaves of its rows. With ``H`` = blake3 (32 bytes),
integers little-endian and ``str(s)`` = u32 length in bytes followed by UTF-8:

    leaf   = H(00 || bytes of one block)
    tensor = H(01 || str(name) || str(dtype) || u32 ndim || u64 dim ... || u64 number of leaves || leaf ...)
    root   = H(02 || str("rollout.weights.v1") || u64 number of tensors || (str(name) || tensor) ... by name as UTF-8)

A block is 256 rows of the first dimension; of a tensor with fewer than two dimensions it is 65,536
elements; the last one may be short, and a tensor without elements has none. Bytes are the row-major
little-endian bytes in transport dtype, whose name is torch's (``float32``, ``bfloat16``). The first
byte separates the three domains, so no leaf can pass for a node. Vectors that every language must
reproduce: ``schemas/golden/weights_digest.json``.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from blake3 import blake3

from rollout_workers.weights.naming import dtype_name

BLOCK_ROWS = 256
BLOCK_ELEMENTS = 65_536
PREFIX = "blake3-"

_LEAF = b"\x00"
_TENSOR = b"\x01"
_ROOT = b"\x02"
_SCHEME = "rollout.weights.v1"
_LITTLE = sys.byteorder == "little"
_PARALLEL_BYTES = 16 << 20  # below this a thread pool costs more than it saves


@dataclass(frozen=True, slots=True)
class WeightsDigest:
    """The digest of a set of tensors.

    root: ``blake3-<64 hex>`` over all tensors; two roots are equal only if names, dtypes, shapes,
    and bytes are equal. tensors: the node of each tensor by name, in the same format, to find which
    tensor differs.
    """

    root: str
    tensors: Mapping[str, str]


def weights_digest(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightsDigest:
    """Digest tensors (any shape, device and layout) under their Hugging Face names, in any order.

    Contiguous CPU tensors are hashed in place; others are copied one at a time. The call blocks for
    about 0.3 s per GB and core and releases the GIL while it hashes, so run it in a thread if there
    is an event loop. Tensors must not change during the call. Raises ``ValueError`` for a duplicate
    name or an unsupported dtype.
    """
    tensors = list(named_tensors)
    if len({name for name, _ in tensors}) != len(tensors):
        raise ValueError("two tensors have the same name; pass tied tensors once, under their first name")
    if sum(tensor.nbytes for _, tensor in tensors) < _PARALLEL_BYTES:
        nodes = {name: tensor_node(name, tensor) for name, tensor in tensors}
    else:
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            nodes = {name: tensor_node(name, tensor, pool) for name, tensor in tensors}
    return WeightsDigest(
        root=PREFIX + root_node(nodes).hex(),
        tensors={name: PREFIX + node.hex() for name, node in nodes.items()},
    )


def streamed_digest(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[WeightsDigest, dict[str, torch.Tensor]]:
    """``weights_digest`` of tensors of which only one exists at a time, and their dtypes and shapes
    as tensors on the meta device. Raises ``ValueError`` as ``weights_digest`` does."""
    nodes: dict[str, bytes] = {}
    layout: dict[str, torch.Tensor] = {}
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for name, tensor in named_tensors:
            if name in nodes:
                raise ValueError(f"two tensors have the name {name}; pass tied tensors once, under their first name")
            nodes[name] = tensor_node(name, tensor, pool if tensor.nbytes >= _PARALLEL_BYTES else None)
            layout[name] = tensor.to("meta")
    digests = {name: PREFIX + node.hex() for name, node in nodes.items()}
    return WeightsDigest(root=PREFIX + root_node(nodes).hex(), tensors=digests), layout


def tensor_node(name: str, tensor: torch.Tensor, pool: ThreadPoolExecutor | None = None) -> bytes:
    """The node (32 bytes) of one tensor."""
    head, size = _frame(name, tensor.dtype, tensor.shape)
    return _node(head, _leaves(raw_bytes(tensor), size, pool))


def tensor_leaves(tensor: torch.Tensor, pool: ThreadPoolExecutor | None = None) -> list[bytes]:
    """The leaves (32 bytes each) of one tensor, in row order."""
    return _leaves(raw_bytes(tensor), _block_bytes(tuple(tensor.shape), tensor.element_size()), pool)


def node_of_leaves(name: str, dtype: str, shape: tuple[int, ...], leaves: list[bytes]) -> bytes:
    """The node (32 bytes) of a tensor from its leaves, for example after gathering them from
    several ranks."""
    return _node(_described(name, dtype, shape), leaves)


def root_node(nodes: Mapping[str, bytes]) -> bytes:
    """The root (32 bytes) over tensor nodes by name."""
    body = b"".join([string + nodes[name] for name, string in _ordered(tuple(nodes))])
    return blake3(_ROOT + _string(_SCHEME) + struct.pack("<Q", len(nodes)) + body).digest()


def _leaves(data: memoryview, size: int, pool: ThreadPoolExecutor | None) -> list[bytes]:
    """The leaves of a tensor's bytes in blocks of ``size`` bytes."""
    if 0 < len(data) <= size:
        return [_leaf(data)]
    blocks = [data[start : start + size] for start in range(0, len(data), size)] if size else []
    return list(pool.map(_leaf, blocks) if pool else map(_leaf, blocks))


def _node(head: bytes, leaves: list[bytes]) -> bytes:
    return blake3(head + struct.pack("<Q", len(leaves)) + b"".join(leaves)).digest()


# The functions below cache values that depend only on names and shapes. For a small model,
# recomputing them took as long as hashing.


@lru_cache(maxsize=4096)
def _frame(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """The header of a tensor's node, and the size of a full block in bytes."""
    return _described(name, dtype_name(dtype), shape), _block_bytes(shape, dtype.itemsize)


@lru_cache(maxsize=16)
def _ordered(names: tuple[str, ...]) -> tuple[tuple[str, bytes], ...]:
    """Names in the order of the root, each with its encoded form."""
    return tuple((name, _string(name)) for name in sorted(names, key=str.encode))


@lru_cache(maxsize=4096)
def _bytes_type(size: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """The ctypes array type of ``size`` bytes, cached because ctypes takes 3 us to create it."""
    return ctypes.c_ubyte * size


def _described(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    return _TENSOR + _string(name) + _string(dtype) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)


def _leaf(block: memoryview) -> bytes:
    return blake3(_LEAF).update(block).digest()


def _block_bytes(shape: tuple[int, ...], element: int) -> int:
    """Size in bytes of a full block. element: size of an element in bytes."""
    if len(shape) < 2:
        return BLOCK_ELEMENTS * element
    return BLOCK_ROWS * math.prod(shape[1:]) * element


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's row-major little-endian bytes: a view if it is contiguous on the CPU, otherwise
    a copy. The view is valid as long as the tensor."""
    size = tensor.nbytes
    if size == 0:
        return memoryview(b"")
    if tensor.is_cpu and _LITTLE and tensor.is_contiguous():
        # The same with torch needs six calls, which took as long as hashing for a small model.
        return memoryview(_bytes_type(size).from_address(tensor.data_ptr())).cast("B")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array = flat.view(torch.uint8).numpy()
    if not _LITTLE and tensor.element_size() > 1:
        array = array.reshape(-1, tensor.element_size())[:, ::-1].copy().reshape(-1)
    return memoryview(array)  # pyright: ignore[reportArgumentType]


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data
