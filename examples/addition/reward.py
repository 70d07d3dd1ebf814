"""The reward of the addition example.

A reward is a function from a list of samples to as many floats. A sample has ``prompt`` and
``completion`` (text, special tokens left out) and ``row`` (the row of the dataset that it came
from).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Sample(Protocol):
    """The fields of a sample that rewards use."""

    prompt: str
    completion: str
    row: dict[str, str]


def exact_match(samples: Sequence[Sample]) -> list[float]:
    """1.0 if the completion equals the answer of the row, else 0.0."""
    return [float(sample.completion == sample.row["answer"]) for sample in samples]
