"""A second implementation of the weights digest, straight from the definition: only bytes and
shapes, without torch, views, and threads."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from blake3 import blake3

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "uint8": 1, "bool": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor: name, dtype name of torch, shape, row-major little-endian bytes."""

    name: str
    dtype: str
    shape: list[int]
    data: bytes


def pattern(length: int) -> bytes:
    """Bytes that are easy to generate in any language: byte i is (31 * i + 7) mod 251."""
    return bytes((31 * i + 7) % 251 for i in range(length))


def leaves(entry: Entry) -> list[str]:
    """The leaves of one tensor, in hex."""
    elements = 256 * prod(entry.shape[1:]) if len(entry.shape) >= 2 else 65_536
    block = elements * SIZES[entry.dtype]
    rest, found = entry.data, []
    while rest:
        found.append(blake3(b"\x00" + rest[:block]).hexdigest())
        rest = rest[block:]
    return found


def node(entry: Entry) -> str:
    """The node of one tensor, in hex."""
    blob = bytearray(b"\x01")
    for text in (entry.name, entry.dtype):
        blob += len(text.encode()).to_bytes(4, "little") + text.encode()
    blob += len(entry.shape).to_bytes(4, "little")
    for size in entry.shape:
        blob += size.to_bytes(8, "little")
    hashes = leaves(entry)
    blob += len(hashes).to_bytes(8, "little")
    for leaf in hashes:
        blob += bytes.fromhex(leaf)
    return blake3(bytes(blob)).hexdigest()


def root(entries: list[Entry]) -> str:
    """The root over tensors, in hex."""
    scheme = b"rollout.weights.v1"
    blob = bytearray(b"\x02" + len(scheme).to_bytes(4, "little") + scheme)
    blob += len(entries).to_bytes(8, "little")
    for name, entry in sorted((entry.name.encode(), entry) for entry in entries):
        blob += len(name).to_bytes(4, "little") + name + bytes.fromhex(node(entry))
    return blake3(bytes(blob)).hexdigest()
