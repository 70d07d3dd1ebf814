"""Attention over prefix trees, piece by piece: what a mask over whole rows would throw away is never computed.

A row holds a tree in depth-first order (packing.py). It is cut into pieces, stretches that don't branch; a piece sees what leads
to it from the root, and of itself what comes before. So a group of eight answers of 32 tokens to a prompt of 256 needs 0.1 M
pairs of positions instead of the 0.26 M of its row. Pieces of about one size are gathered side by side and computed at once. A
piece's keys come to it as copies, which costs what not sharing them would, and adds up their gradients in a fixed order.

Models call this through the library's registry of attention functions; without a layout it is plain attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rollout_tree"
WORTH = 0.75  # pairs of positions that pieces need, as a share of whole rows', above which rows are computed whole
SHORT = 16  # tokens of a piece in the mean, below which to gather costs more than it saves
WASTE = 1.25  # pairs that are computed side by side, to those that are needed

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows to be taken from a [n, ...], and for the gradient of each of the n rows what was taken of it, as bags of places."""

    taken: Tensor
    """int64 [m]."""
    places: Tensor
    """int64 [k], k <= m: places in ``taken``, bag after bag. Those that fill a shape are in none: they have no gradient."""
    bags: Tensor
    """int64 [n]: where each row's bag begins."""

    @classmethod
    def of(cls, taken: Index, real: Index, rows: int, device: torch.device) -> Gather:
        """taken: int64 [m]. real: the places in it that count, ascending. rows: n."""
        order = real[np.argsort(taken[real], kind="stable")]
        bags = np.searchsorted(taken[order], np.arange(rows))
        return cls(*(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in (taken, order, bags)))

    def __call__(self, source: Tensor) -> Tensor:
        """source: [n, W] -> [m, W]."""
        return _Take.apply(source, self.taken, self.places, self.bags)  # type: ignore[no-any-return]


class _Take(torch.autograd.Function):
    """``source[taken]``, whose backward pass sums each bag in order."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, taken: Tensor, places: Tensor, bags: Tensor) -> Tensor:
        ctx.save_for_backward(places, bags)
        return source.index_select(0, taken)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        places, bags = ctx.saved_tensors
        return functional.embedding_bag(places, grad.contiguous(), bags, mode="sum"), None, None, None


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of about one size, n of them, padded to ``queries`` positions that see ``keys``."""

    queries: int
    keys: int
    query: Gather
    """n * queries flat positions of the rows."""
    key: Gather
    """n * keys flat positions: what leads to a piece, and itself."""
    seen: Tensor | None
    """bool [n, queries, keys]: what a query sees. None where nothing leads to the pieces: what comes before it."""
    masks: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float | None) -> Tensor:
        """query: [positions, heads * D]; key, value: [positions, kv_heads * D]. Returns [n * queries, heads * D]."""
        size = query.shape[1] // heads
        shared = query.shape[1] // key.shape[1]
        q = self.query(query).view(-1, self.queries, heads, size)
        k, v = (self.key(part).view(-1, self.keys, heads // shared, size).transpose(1, 2) for part in (key, value))
        if self.seen is None:
            found = functional.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=shared > 1
            )
            return found.transpose(1, 2).reshape(-1, heads * size)
        # heads that share their keys are more queries of these
        q = q.unflatten(2, (-1, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(shared, query.dtype), scale=scale)
        return found.unflatten(2, (shared, -1)).permute(0, 3, 1, 2, 4).reshape(-1, heads * size)

    def _mask(self, shared: int, dtype: torch.dtype) -> Tensor:
        """Additive, [n, 1, shared * queries, keys]; made once for all layers."""
        assert self.seen is not None
        if shared not in self.masks:
            mask = torch.zeros(self.seen.shape, dtype=dtype, device=self.seen.device)
            mask.masked_fill_(~self.seen, torch.finfo(dtype).min)
            self.masks[shared] = mask.repeat(1, shared, 1)[:, None]
        return self.masks[shared]


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """How the rows of a micro-batch are cut."""

    pieces: tuple[Pieces, ...]
    back: Gather
    """For each flat position of the rows its place in the pieces' outputs, one behind the other; any for padding."""


def tree_layout(subtree_end: Index, sizes: Index, device: torch.device) -> TreeLayout | None:
    """The layout of a ``MicroBatch``'s rows, by its ``subtree_end`` [B, T] and ``sizes`` [B]; None where a mask does as well."""
    rows, width = subtree_end.shape
    new = np.ones((rows, width), bool)
    new[:, 1:] = (subtree_end[:, 1:] != subtree_end[:, :-1]) | (subtree_end[:, :-1] == np.arange(1, width))
    real = np.arange(width) < sizes[:, None]
    new &= real
    if int(new.sum()) * SHORT > int(sizes.sum()):
        return None
    cut = [piece for row, size in enumerate(sizes.tolist()) for piece in _cut(subtree_end[row, :size], new[row], row * width)]
    buckets = list(_buckets(sorted(cut, key=lambda piece: piece.size)))
    if sum(bucket.pairs for bucket in buckets) > WORTH * rows * width * width:
        return None
    place, first = np.zeros(rows * width, np.int64), 0
    for bucket in buckets:
        for piece in bucket.pieces:
            place[piece.own] = first + np.arange(len(piece.own))
            first += bucket.queries
    pieces = tuple(bucket.side_by_side(rows * width, device) for bucket in buckets)
    return TreeLayout(pieces, Gather.of(place, np.flatnonzero(real), first, device))


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreeLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of the library: query [B, heads, T, D], key and value [B, kv_heads, T, D] -> [B, T, heads, D]."""
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows, heads, width, size = query.shape
    q, k, v = (part.transpose(1, 2).reshape(rows * width, -1) for part in (query, key, value))
    found = torch.cat([pieces.attend(q, k, v, heads, scaling) for pieces in tree.pieces])
    return tree.back(found).view(rows, width, heads, size), None


def install(model: PreTrainedModel, agrees: Callable[[], bool]) -> bool:
    """Have a model that attends by ``scaled_dot_product_attention`` use ``attend``, unless it then no longer ``agrees``. Returns
    whether it agrees as it is left."""
    if model.config._attn_implementation != "sdpa":
        return agrees()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    if agrees():
        return True
    model.set_attn_implementation("sdpa")
    return agrees()


def installed(module: Any) -> bool:
    """Whether ``tree`` may be given to a call of a model, or of a part of it."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME


@dataclass(frozen=True, slots=True)
class _Piece:
    own: Index
    """Its flat positions."""
    before: Index
    """Those that lead to it from the root."""

    @property
    def size(self) -> tuple[bool, int, int]:
        """Pieces at a root first, then by what they see."""
        return len(self.before) > 0, len(self.before) + len(self.own), len(self.own)


def _cut(end: Index, new: NDArray[np.bool_], offset: int) -> Iterator[_Piece]:
    """The pieces of one row, whose first flat position is ``offset``."""
    starts = np.flatnonzero(new).tolist()
    path: list[tuple[int, Index]] = []  # where the subtree of each open piece ends, and its positions
    for start, stop in zip(starts, [*starts[1:], len(end)], strict=True):
        while path and path[-1][0] <= start:
            path.pop()
        own = np.arange(offset + start, offset + stop)
        yield _Piece(own, np.concatenate([own[:0], *(held for _, held in path)]))
        path.append((int(end[stop - 1]), own))


@dataclass(slots=True)
class _Bucket:
    pieces: list[_Piece]
    queries: int = 0
    keys: int = 0
    needed: int = 0

    def add(self, piece: _Piece) -> _Bucket:
        """The bucket with one more."""
        _, keys, queries = piece.size
        needed = self.needed + queries * keys
        return _Bucket([*self.pieces, piece], max(self.queries, queries), max(self.keys, keys), needed)

    @property
    def pairs(self) -> int:
        """Pairs of positions that are computed."""
        return len(self.pieces) * self.queries * self.keys

    def side_by_side(self, positions: int, device: torch.device) -> Pieces:
        """positions: of all rows."""
        count, leads = len(self.pieces), len(self.pieces[0].before) > 0
        query, key = np.zeros((count, self.queries), np.int64), np.zeros((count, self.keys), np.int64)
        asks, there = np.zeros(query.shape, bool), np.zeros(key.shape, bool)
        seen = np.zeros((count, self.queries, self.keys), bool)
        for number, piece in enumerate(self.pieces):
            own, before = len(piece.own), len(piece.before)
            query[number, :own], key[number, : before + own] = piece.own, np.concatenate((piece.before, piece.own))
            asks[number, :own] = there[number, : before + own] = True
            seen[number] = np.tri(self.queries, self.keys, before, dtype=bool)
        return Pieces(
            self.queries,
            self.keys,
            Gather.of(query.ravel(), np.flatnonzero(asks), positions, device),
            Gather.of(key.ravel(), np.flatnonzero(there), positions, device),
            torch.from_numpy(seen).to(device) if leads else None,
        )


def _buckets(pieces: Sequence[_Piece]) -> Iterator[_Bucket]:
    """Cut sorted pieces where to go on would pad too much."""
    held = _Bucket([])
    for piece in pieces:
        more = held.add(piece)
        roots = bool(held.pieces) and (len(held.pieces[0].before) > 0) != (len(piece.before) > 0)
        if roots or more.pairs > WASTE * more.needed:
            yield held
            more = _Bucket([]).add(piece)
        held = more
    if held.pieces:
        yield held
