"""The reward of the SmolLM2 example: the correct number in a short reply.

Exact match alone would be 0 for every sample at the start, and a group of equal rewards teaches
nothing; so brevity counts a little from the first step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

NUMBER = re.compile(r"\d+")
CHARACTERS = 30


class Sample(Protocol):
    """The fields of a sample that rewards use."""

    prompt: str
    completion: str
    row: dict[str, str]


def number_and_brevity(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """0.6 if the last number in the reply is the answer, and up to 0.4 for a short reply.

    Returns mappings: ``reward`` is the training signal, ``accuracy`` the share of correct numbers,
    a metric.
    """
    return [score(sample) for sample in samples]


def score(sample: Sample) -> dict[str, float]:
    """The reward of one sample, and its parts."""
    numbers = NUMBER.findall(sample.completion)
    right = float(bool(numbers) and numbers[-1] == sample.row["answer"])
    brevity = max(0.0, 1.0 - len(sample.completion) / CHARACTERS)
    return {"reward": 0.6 * right + 0.4 * brevity, "accuracy": right, "brevity": brevity}
