"""A reward that differs between any two answers: the share of vowels. For measurements, where all
must be computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Sample(Protocol):
    """What a reward sees of a sample."""

    completion: str


def vowels(samples: Sequence[Sample]) -> list[float]:
    """Between 0 and 1."""
    return [sum(letter in "aeiou" for letter in s.completion) / max(1, len(s.completion)) for s in samples]
