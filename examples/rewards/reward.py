"""Rewards of completions and of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Sample(Protocol):
    """The fields of a sample that rewards use."""

    prompt: str
    completion: str
    row: dict[str, str]


def exact_match(samples: Sequence[Sample]) -> list[float]:
    """1.0 if the completion equals the answer of the row, else 0.0."""
    return [float(sample.completion == sample.row["answer"]) for sample in samples]


def digits(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """0.2 for each correct digit, and 1 for the correct answer."""
    return [
        {
            "reward": float(sample.completion == sample.row["answer"]),
            "step_rewards": [
                {"start": place, "end": place + 1, "reward": 0.2}
                for place, (said, right) in enumerate(zip(sample.completion, sample.row["answer"], strict=False))
                if said == right
            ],
        }
        for sample in samples
    ]
