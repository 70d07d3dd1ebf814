"""A tool of the policy, and the reward of its answer."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.plugin import Sample


def add(a: int, b: int) -> int:
    """Add two numbers.

    a: the first
    b: the second
    """
    return a + b


def exact(samples: Sequence[Sample]) -> list[float]:
    """1 for the right answer, otherwise 0."""
    return [float(sample.completion.strip() == sample.row["answer"]) for sample in samples]
