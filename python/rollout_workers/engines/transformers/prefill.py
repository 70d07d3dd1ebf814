"""Groups prompts that run through the model together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SMALLEST_BUCKET = 8
_BUCKETED_TOKENS = 256


class PrefillBatch(NamedTuple):
    """members: indices into the sequences, one per row; further rows are empty. ids int64[rows, T],
    lengths int64[rows]."""

    members: list[int]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]


def by_size(sequences: Sequence[NDArray[np.int64]], max_tokens: int) -> Iterator[PrefillBatch]:
    """Batches of similar lengths, of at most ``max_tokens`` with padding. A longer sequence gets
    its own batch."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    start = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            shortest, longest = len(sequences[order[start]]), len(sequences[order[end]])
            if (end - start + 1) * longest <= max_tokens and longest <= 2 * shortest + 8:
                continue
        members = order[start:end]
        yield _batch(sequences, members, len(members), len(sequences[members[-1]]))
        start = end


def by_part(starts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Batches of sequences of similar ``lengths``, of which the first ``starts`` tokens are
    computed. A batch has at most ``max_tokens`` with padding, or one sequence."""
    members: list[int] = []
    known = new = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        known, new = max(known, starts[i]), max(new, lengths[i] - starts[i])
        if members and ((len(members) + 1) * (known + new) > max_tokens or lengths[i] > 2 * lengths[members[0]] + 8):
            yield members
            members, known, new = [], starts[i], lengths[i] - starts[i]
        members.append(i)
    if members:
        yield members


def by_bucket(sequences: Sequence[NDArray[np.int64]], max_len: int) -> Iterator[PrefillBatch]:
    """Batches whose shape depends only on the length of each member: ``bucket_shape``."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for i, sequence in enumerate(sequences):
        buckets.setdefault(bucket_shape(len(sequence), max_len), []).append(i)
    for (rows, width), members in buckets.items():
        for start in range(0, len(members), rows):
            yield _batch(sequences, members[start : start + rows], rows, width)


def bucket_shape(length: int, max_len: int) -> tuple[int, int]:
    """Rows and padded length of the pass for a sequence of this length: 256 tokens together, or one
    row.

    The padded length is the next power of two from 8 on, at most ``max_len``.
    """
    width = min(max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length()), max_len)
    return max(1, _BUCKETED_TOKENS // width), width


def _batch(sequences: Sequence[NDArray[np.int64]], members: list[int], rows: int, width: int) -> PrefillBatch:
    ids = np.zeros((rows, width), np.int64)
    lengths = np.ones(rows, np.int64)
    for row, member in enumerate(members):
        sequence = sequences[member]
        ids[row, : len(sequence)] = sequence
        lengths[row] = len(sequence)
    return PrefillBatch(members, ids, lengths)
