"""Mixes the rows of several sources into the order of one file, with exact counts.

Every choice follows from the seed and the names of the sources through a hash, so that the same
configuration gives the same bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from hashlib import blake2b


def counts(rows: Sequence[int], weights: Sequence[float] | None, until: str) -> list[int]:
    """The number of rows that an epoch has from each source.

    rows: that the sources have, each at least 1. weights: their shares; None: every row once.
    until: ``first_exhausted`` makes the epoch as long as it can be without repeating a row,
    ``all_exhausted`` as short as it can be with every row.

    Example: 100 and 10 rows with weights 3 and 1 are 30 and 10, or 100 and 34.
    """
    if weights is None:
        return list(rows)
    total = sum(Fraction(weight) for weight in weights)
    shares = [Fraction(weight) / total for weight in weights]
    lengths = [have / share for have, share in zip(rows, shares, strict=True)]
    if until == "first_exhausted":
        return [min(have, max(1, int(share * min(lengths)))) for have, share in zip(rows, shares, strict=True)]
    return [max(have, -int(-share * max(lengths) // 1)) for have, share in zip(rows, shares, strict=True)]


def order(names: Sequence[str], rows: Sequence[int], taken: Sequence[int], seed: int) -> Iterator[tuple[int, int]]:
    """(source, row) of each row of an epoch. names, rows, taken: by source. Of a source with more
    rows than are taken a random part is chosen, and one with fewer is repeated."""
    picked = [_pick(name, have, count, seed) for name, have, count in zip(names, rows, taken, strict=True)]
    places = sorted(
        (_draw(seed, name, "place", number), source) for source, name in enumerate(names) for number in range(len(picked[source]))
    )
    upcoming = [iter(chosen) for chosen in picked]
    for _, source in places:
        yield source, next(upcoming[source])


def _pick(name: str, have: int, count: int, seed: int) -> list[int]:
    """The rows of a source that an epoch has, in the order of the source."""
    whole, part = divmod(count, have)
    rest = sorted(range(have), key=lambda row: _draw(seed, name, "row", row))[:part] if part else []
    return [*range(have)] * whole + sorted(rest)


def _draw(seed: int, name: str, what: str, number: int) -> bytes:
    return blake2b(f"{seed}/{name}/{what}/{number}".encode(), digest_size=16).digest()
