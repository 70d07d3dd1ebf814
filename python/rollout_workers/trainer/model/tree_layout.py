"""Splits rows of prefix trees into pieces for attention, and groups the pieces by size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_workers.trainer.model.gather import Gather, Index
from rollout_workers.trainer.model.tree_attention import Pieces, TreeLayout

WORTH = 0.75  # share of the pairs of whole rows above which rows are not split
SHORT = 16  # mean tokens per piece below which gathering costs more than it saves
WASTE = 1.25  # computed pairs per needed pair of a group of pieces


def tree_layout(subtree_end: Index, sizes: Index, device: torch.device) -> TreeLayout | None:
    """The layout of a ``MicroBatch`` with ``subtree_end`` [B, T] and ``sizes`` [B]; None if a mask
    is as fast."""
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
    pieces = tuple(bucket.gathered(rows * width, device) for bucket in buckets)
    return TreeLayout(pieces, Gather.of(place, np.flatnonzero(real), first, device))


@dataclass(frozen=True, slots=True)
class _Piece:
    own: Index
    """The flat positions of the piece."""
    before: Index
    """The flat positions of the path from the root to it."""

    @property
    def size(self) -> tuple[bool, int, int]:
        """The sort key: pieces at a root first, then by the number of keys."""
        return len(self.before) > 0, len(self.before) + len(self.own), len(self.own)


def _cut(end: Index, new: NDArray[np.bool_], offset: int) -> Iterator[_Piece]:
    """The pieces of the row that begins at flat position ``offset``."""
    starts = np.flatnonzero(new).tolist()
    path: list[tuple[int, Index]] = []  # of each open piece: the end of its subtree, its positions
    for start, stop in zip(starts, [*starts[1:], len(end)], strict=True):
        while path and path[-1][0] <= start:
            path.pop()
        own = np.arange(offset + start, offset + stop)
        yield _Piece(own, np.concatenate([own[:0], *(positions for _, positions in path)]))
        path.append((int(end[stop - 1]), own))


@dataclass(slots=True)
class _Bucket:
    """Pieces that are computed together. queries, keys: the maximum over them. needed: the sum of
    their pairs."""

    rooted: bool
    """Whether they have a path before them; all or none do."""
    pieces: list[_Piece] = field(default_factory=list)
    queries: int = 0
    keys: int = 0
    needed: int = 0

    def add(self, piece: _Piece) -> bool:
        """Add a piece, unless it needs too much padding; returns whether it was added."""
        rooted, keys, queries = piece.size
        most_queries, most_keys = max(self.queries, queries), max(self.keys, keys)
        needed = self.needed + queries * keys
        if rooted != self.rooted or (len(self.pieces) + 1) * most_queries * most_keys > WASTE * needed:
            return False
        self.pieces.append(piece)
        self.queries, self.keys, self.needed = most_queries, most_keys, needed
        return True

    @property
    def pairs(self) -> int:
        """The number of computed pairs of positions."""
        return len(self.pieces) * self.queries * self.keys

    def gathered(self, positions: int, device: torch.device) -> Pieces:
        """The pieces as tensors. positions: flat positions of all rows."""
        count = len(self.pieces)
        query, key = np.zeros((count, self.queries), np.int64), np.zeros((count, self.keys), np.int64)
        real_query, real_key = np.zeros(query.shape, bool), np.zeros(key.shape, bool)
        for number, piece in enumerate(self.pieces):
            own, keys = len(piece.own), len(piece.before) + len(piece.own)
            query[number, :own], key[number, :keys] = piece.own, np.concatenate((piece.before, piece.own))
            real_query[number, :own] = real_key[number, :keys] = True
        return Pieces(
            self.queries,
            self.keys,
            Gather.of(query.ravel(), np.flatnonzero(real_query), positions, device),
            Gather.of(key.ravel(), np.flatnonzero(real_key), positions, device),
            torch.from_numpy(self._visible()).to(device) if self.rooted else None,
        )

    def _visible(self) -> NDArray[np.bool_]:
        """bool [pieces, queries, keys]: the path before a piece, and the piece itself causally."""
        before = np.array([len(piece.before) for piece in self.pieces])
        return np.arange(self.keys) <= np.arange(self.queries)[:, None] + before[:, None, None]


def _buckets(pieces: Sequence[_Piece]) -> list[_Bucket]:
    """Group sorted pieces so that padding stays small."""
    out: list[_Bucket] = []
    for piece in pieces:
        if not (out and out[-1].add(piece)):
            out.append(_Bucket(rooted=piece.size[0]))
            out[-1].add(piece)
    return out
