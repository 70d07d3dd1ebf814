"""How rows of prefix trees are cut into pieces for attention, and which pieces are computed side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_workers.trainer.model.gather import Gather, Index
from rollout_workers.trainer.model.tree_attention import Pieces, TreeLayout

WORTH = 0.75  # pairs of positions that pieces need, as a share of whole rows', above which rows are computed whole
SHORT = 16  # tokens of a piece in the mean, below which to gather costs more than it saves
WASTE = 1.25  # pairs that are computed side by side, to those that are needed


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
    buckets = _buckets(sorted(cut, key=lambda piece: piece.size))
    if sum(bucket.pairs for bucket in buckets) > WORTH * rows * width * width:
        return None
    place, first = np.zeros(rows * width, np.int64), 0
    for bucket in buckets:
        for piece in bucket.pieces:
            place[piece.own] = first + np.arange(len(piece.own))
            first += bucket.queries
    pieces = tuple(bucket.side_by_side(rows * width, device) for bucket in buckets)
    return TreeLayout(pieces, Gather.of(place, np.flatnonzero(real), first, device))


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
    """Pieces that are computed side by side, all at a root or none. queries, keys: of the largest. needed: pairs in all."""

    leads: bool
    """Whether something leads to them."""
    pieces: list[_Piece] = field(default_factory=list)
    queries: int = 0
    keys: int = 0
    needed: int = 0

    def take(self, piece: _Piece) -> bool:
        """Take one more where that does not pad too much."""
        leads, keys, queries = piece.size
        most_queries, most_keys = max(self.queries, queries), max(self.keys, keys)
        needed = self.needed + queries * keys
        if leads != self.leads or (len(self.pieces) + 1) * most_queries * most_keys > WASTE * needed:
            return False
        self.pieces.append(piece)
        self.queries, self.keys, self.needed = most_queries, most_keys, needed
        return True

    @property
    def pairs(self) -> int:
        """Pairs of positions that are computed."""
        return len(self.pieces) * self.queries * self.keys

    def side_by_side(self, positions: int, device: torch.device) -> Pieces:
        """positions: of all rows."""
        count = len(self.pieces)
        query, key = np.zeros((count, self.queries), np.int64), np.zeros((count, self.keys), np.int64)
        asks, there = np.zeros(query.shape, bool), np.zeros(key.shape, bool)
        for number, piece in enumerate(self.pieces):
            own, seen = len(piece.own), len(piece.before) + len(piece.own)
            query[number, :own], key[number, :seen] = piece.own, np.concatenate((piece.before, piece.own))
            asks[number, :own] = there[number, :seen] = True
        return Pieces(
            self.queries,
            self.keys,
            Gather.of(query.ravel(), np.flatnonzero(asks), positions, device),
            Gather.of(key.ravel(), np.flatnonzero(there), positions, device),
            torch.from_numpy(self._seen()).to(device) if self.leads else None,
        )

    def _seen(self) -> NDArray[np.bool_]:
        """bool [pieces, queries, keys]: what leads to a piece, and of itself what comes before."""
        before = np.array([len(piece.before) for piece in self.pieces])
        return np.arange(self.keys) <= np.arange(self.queries)[:, None] + before[:, None, None]


def _buckets(pieces: Sequence[_Piece]) -> list[_Bucket]:
    """Cut sorted pieces where to go on would pad too much."""
    out: list[_Bucket] = []
    for piece in pieces:
        if not (out and out[-1].take(piece)):
            out.append(_Bucket(leads=piece.size[0]))
            out[-1].take(piece)
    return out
