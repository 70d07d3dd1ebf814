"""The KV cache: one dense tensor with a row of positions per slot."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Chunk(NamedTuple):
    """The places that a pass over T new tokens of P sequences writes and reads, for all layers.

    positions int64[P, T]: limited to max_len - 1 in padding. flat int64[P * T]: row * L + position.
    mask [P, 1, T, L] in the model's dtype: 0 up to and including a token's position, else the
    dtype's lowest number.
    """

    positions: Tensor
    flat: Tensor
    mask: Tensor


def chunk_index(width: int, starts: Tensor, kv: Tensor, max_len: int) -> Chunk:
    """The index of a pass over ``width`` tokens from ``starts`` int64[P] on, whose KV becomes part
    of kv [layers, P, L, 2, heads, dim]."""
    rows, length = kv.shape[1:3]
    positions = starts[:, None] + torch.arange(width, device=kv.device)
    flat = torch.arange(0, rows * length, length, device=kv.device)[:, None] + positions
    mask = torch.zeros((rows, 1, width, length), dtype=kv.dtype, device=kv.device)
    mask.masked_fill_(torch.arange(length, device=kv.device) > positions[:, None, :, None], torch.finfo(kv.dtype).min)
    return Chunk(positions.clamp(max=max_len - 1), flat.flatten(), mask)


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of one token's KV: layers of a key and a value of heads * dim elements each."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype


class KvCache:
    """``data`` [layers, slots, max_len, 2, heads, dim]: position p of slot s has the key and the
    value of token p.

    The keys and values of a token are adjacent, so a decoding step writes one contiguous row per
    slot and layer. Positions that were never written are zero, because attention multiplies them by
    0, and 0 * NaN is NaN.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @classmethod
    def empty(cls, shape: KvShape, slots: int, max_len: int, device: torch.device) -> KvCache:
        """A cache of zeros. On the CPU the system allocates a page of memory when it is first used,
        so unused context costs nothing."""
        size = (shape.layers, slots, max_len, 2, shape.heads, shape.dim)
        if device.type != "cpu":
            return cls(torch.zeros(size, dtype=shape.dtype, device=device))
        pages = mmap.mmap(-1, int(np.prod(size)) * shape.dtype.itemsize)
        if sys.platform == "linux":
            pages.madvise(mmap.MADV_NOHUGEPAGE)  # otherwise the first token of a slot would allocate and zero 2 MB per layer
        return cls(torch.frombuffer(pages, dtype=shape.dtype).view(size))

    def block(self, start: int, stop: int) -> KvCache:
        """The slots [start, stop) as a separate cache on the same memory."""
        return KvCache(self.data[:, start:stop])

    def write(self, slots: Tensor, prompt: Tensor) -> None:
        """Copy ``prompt`` [layers, n, T, 2, heads, dim] to the start of ``slots`` int64[n]."""
        self.data[:, slots, : prompt.shape[2]] = prompt

    def spread(self, slots: NDArray[np.int64], counts: Sequence[int], prompts: Tensor) -> None:
        """Copy each of ``prompts`` [layers, G, T, 2, heads, dim] to the start of ``counts[g]`` of
        ``slots`` int64[n].

        The slots are ordered by group. Adjacent slots of groups with the same size are filled by
        one copy.
        """
        length, count = prompts.shape[2], counts[0]
        begins = slots[np.cumsum(counts, dtype=np.int64) - np.array(counts, np.int64)]
        start, stop = int(slots.min()), int(slots.max()) + 1
        even = stop - start == len(slots) and counts.count(count) == len(counts)
        if even and (np.diff(slots.reshape(-1, count)) == 1).all():
            order = torch.from_numpy(np.argsort(begins)).to(prompts.device)
            run = self.data[:, start:stop, :length].unflatten(1, (len(counts), count))
            run.copy_(prompts[:, order].unsqueeze(2))
            return
        rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(prompts.device)
        self.write(torch.from_numpy(slots).to(prompts.device), prompts[:, rows])

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` positions of the slots ``source`` int64[n] to ``target``
        int64[n]. Sources and targets may overlap."""
        self.data[:, target, :length] = self.data[:, source, :length]

    def clear(self, slots: Tensor) -> None:
        """Zero whole slots."""
        self.data[:, slots] = 0


class Segment(NamedTuple):
    """Neighboring rows [start, stop) of a step that attend to the first ``length`` positions of
    their slots."""

    start: int
    stop: int
    length: int


class StepIndex(NamedTuple):
    """The places that a decoding step of B rows writes and reads, for all layers.

    flat int64[B]: row * max_len + position. reads: per segment its additive mask [rows, 1, 1,
    length] in the model's dtype: 0 up to and including a row's position, after it the dtype's
    lowest number, whose probability underflows to exactly 0.
    """

    flat: Tensor
    reads: list[tuple[Segment, Tensor]]


def step_index(positions: Tensor, segments: Sequence[Segment], cache: KvCache) -> StepIndex:
    """The index of a step whose row r writes position positions[r], int64[B]."""
    rows, max_len, device = positions.shape[0], cache.data.shape[2], positions.device
    flat = torch.arange(0, rows * max_len, max_len, device=device) + positions
    longest = max(segment.length for segment in segments)
    ahead = torch.arange(longest, device=device) > positions.unsqueeze(-1)
    mask = torch.zeros((rows, longest), dtype=cache.data.dtype, device=device)
    mask.masked_fill_(ahead, torch.finfo(mask.dtype).min)
    return StepIndex(flat, [(s, mask[s.start : s.stop, None, None, : s.length]) for s in segments])
