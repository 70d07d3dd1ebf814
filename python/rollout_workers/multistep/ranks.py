"""Which environment ranks a rollout rank exchanges rows with.

The rows of a batch are numbered over all ranks of a side, and each rank of a side has an equal
range of them. Two ranks are mapped if their ranges overlap, so the mapping is many to many.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """A mapped rank of the other side, and the number of rows that the two share."""

    rank: int
    rows: int


def mapped_ranks(rows: int, *, world_size: int, peers: int, rank: int) -> tuple[Peer, ...]:
    """The ranks of the other side that ``rank`` is mapped to, ascending.

    12 rows of 2 ranks, mapped to 3 ranks:

    >>> mapped_ranks(12, world_size=2, peers=3, rank=0)
    (Peer(rank=0, rows=4), Peer(rank=1, rows=2))

    rows: of all ranks together, a multiple of ``world_size`` and of ``peers``. Raises
    ``ValueError`` otherwise, or if there is no such rank.
    """
    for name, size in (("world_size", world_size), ("peers", peers)):
        if size < 1 or rows < 1 or rows % size:
            raise ValueError(f"{rows} rows can't be divided equally among {size} ranks ({name})")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0..{world_size - 1}")
    own, theirs = rows // world_size, rows // peers
    first, end = rank * own, (rank + 1) * own
    return tuple(
        Peer(peer, min(end, (peer + 1) * theirs) - max(first, peer * theirs))
        for peer in range(first // theirs, (end - 1) // theirs + 1)
    )


def channel_key(source: int, destination: int, mode: str) -> str:
    """The key under which rank ``source`` of one side sends to rank ``destination`` of the other:
    ``0_1_train``."""
    return f"{source}_{destination}_{mode}"
