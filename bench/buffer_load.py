"""The groups of samples that every system of bench/buffer.py transfers, and the check of the
results. Needs only numpy."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

IN_FLIGHT = 4
"""Number of groups that are sent at the same time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """groups of size samples of tokens tokens; the consumer gets batch groups at a time."""

    groups: int
    size: int
    tokens: int
    batch: int

    @property
    def group_bytes(self) -> int:
        return self.size * self.tokens * 9  # int32, float32, uint8


SHAPES = {"big": Shape(200, 16, 32_768, 8), "small": Shape(5_000, 8, 256, 100)}


def shape_of(name: str, share: float) -> Shape:
    """A shape with a share of its groups, but at least whole batches."""
    whole = SHAPES[name]
    groups = max(1, round(whole.groups * share / whole.batch)) * whole.batch
    return Shape(groups, whole.size, whole.tokens, whole.batch)


def finish(verified: int) -> None:
    """Report the end of the measurement and the bytes that were checked."""
    print("end", json.dumps({"verified": verified}), flush=True)


class Load:
    """The samples of a group: the first token of each names the group, everything else is the same
    in all groups."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        random = np.random.default_rng(7)
        self.ids = random.integers(0, 150_000, (shape.size, shape.tokens), dtype=np.int32)
        self.logprobs = -random.random((shape.size, shape.tokens), dtype=np.float32)
        self.mask = random.integers(0, 2, (shape.size, shape.tokens), dtype=np.uint8)
        self.received: set[int] = set()
        self.verified = 0
        self._rest = [row[1:].tobytes() for row in self.ids]
        self._others = [(a.tobytes(), b.tobytes()) for a, b in zip(self.logprobs, self.mask, strict=True)]

    def stamp(self, group: int) -> None:
        self.ids[:, 0] = group

    def check(self, sample: int, ids: np.ndarray, logprobs: np.ndarray, mask: np.ndarray) -> None:
        """Compare a sample with what was put; ``verified`` counts its bytes."""
        if self.shape.tokens > 4096:
            same = (
                np.array_equal(ids[1:], self.ids[sample][1:])
                and np.array_equal(logprobs, self.logprobs[sample])
                and np.array_equal(mask, self.mask[sample])
            )
        else:  # numpy's comparison takes longer than comparing bytes
            same = ids[1:].tobytes() == self._rest[sample] and (logprobs.tobytes(), mask.tobytes()) == self._others[sample]
        if not same:
            raise SystemExit(f"sample {sample} of group {ids[0]} differs from the sample that was put")
        if not sample:
            group = int(ids[0])
            if group in self.received or not 0 <= group < self.shape.groups:
                raise SystemExit(f"group {group} arrived twice or was not put")
            self.received.add(group)
        self.verified += ids.nbytes + logprobs.nbytes + mask.nbytes
