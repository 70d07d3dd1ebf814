"""The order of the slots: samples of similar length next to each other, free slots last.

A step's attention costs as much as its longest row. So rows are read in segments of one length
class: the next power of two, from 16 on. The class of a sample depends only on its own position, as
deterministic mode requires.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rollout_workers.engines.transformers.kv import Segment

_SMALLEST_CLASS = 16
_STRETCH = 32
_SPARE_RUNS = 3  # an additional segment costs a kernel call per layer, a move costs a copy

Ints = NDArray[np.int64]


def length_class(positions: Ints, max_len: int) -> Ints:
    """The number of positions to read for rows that write ``positions``: the class of position +
    1."""
    exponents = np.ceil(np.log2(np.maximum(positions + 1, _SMALLEST_CLASS))).astype(np.int64)
    return np.minimum(1 << exponents, max_len)


def segments(positions: Ints, active: NDArray[np.bool_], max_len: int) -> list[Segment]:
    """Segments of one class over all rows. A free row (position 0) joins the active row before
    it."""
    classes = length_class(positions, max_len)
    last = np.maximum.accumulate(np.where(active, np.arange(len(active)), -1))
    first = int(active.argmax())
    classes = classes[np.where(last < 0, first, last)]
    cuts = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(classes)]
    return [Segment(start, stop, int(classes[start])) for start, stop in pairwise(cuts)]


def loose_segments(positions: Ints, max_len: int) -> list[Segment]:
    """Few segments, each as long as its longest row: blocks of 32 rows, joined if their classes are
    equal.

    For the fast mode, where a row may read beyond its class: unsorted rows cost additional reads
    instead of additional segments.
    """
    starts = np.arange(0, len(positions), _STRETCH)
    lengths = np.maximum.reduceat(positions, starts) + 1
    classes = length_class(lengths - 1, max_len)
    first = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist()]
    longest = np.maximum.reduceat(lengths, first).tolist()
    cuts = [*starts[first].tolist(), len(positions)]
    return [Segment(start, stop, length) for (start, stop), length in zip(pairwise(cuts), longest, strict=True)]


def is_scattered(runs: list[Segment]) -> bool:
    """Whether the classes are so mixed that sorting is worthwhile."""
    return len(runs) > len({run.length for run in runs}) + _SPARE_RUNS


def moves(positions: Ints, active: NDArray[np.bool_], max_len: int) -> tuple[Ints, Ints]:
    """(source, target) of the fewest simultaneous moves that bring active rows to the lowest slots,
    longest class first."""
    rows = np.flatnonzero(active)
    classes = np.where(active, length_class(positions, max_len), -1)
    wanted = np.sort(classes[rows])[::-1]
    wrong = np.flatnonzero(classes[: len(rows)] != wanted)
    right = np.zeros(len(active), bool)
    right[: len(rows)] = classes[: len(rows)] == wanted
    movers = rows[~right[rows]]
    source = movers[np.argsort(classes[movers], kind="stable")]
    return source, wrong[np.argsort(wanted[wrong], kind="stable")]
