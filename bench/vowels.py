"""A reward that differs between most answers: the share of vowels. For measurements in which no
group may be skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Sample(Protocol):
    """The part of a sample that a reward uses."""

    completion: str


def vowels(samples: Sequence[Sample]) -> list[float]:
    """The share of vowels, from 0 to 1."""
    return [sum(letter in "aeiou" for letter in s.completion) / max(1, len(s.completion)) for s in samples]
