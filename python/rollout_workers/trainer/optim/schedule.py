"""The learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHAPES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to ``peak`` over ``warmup_steps``, then constant, linear to 0, or half a
    cosine to 0 at ``steps``.

    From the peak on, the rates equal those of transformers' ``get_scheduler``. Its warm-up starts
    at 0, a step that trains nothing; this one starts at ``peak / warmup_steps``, so two steps have
    the peak rate.
    """

    peak: float
    shape: str = "constant"
    warmup_steps: int = 0
    steps: int = 1

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"schedule {self.shape!r} is unknown; use one of {', '.join(SHAPES)}")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1. A decay reaches 0 one step after the
        last."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        share = min(1.0, (step - 1 - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.peak * (1 - share if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * share)))
