"""The learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHAPES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to ``peak`` over ``warmup_steps``, then constant, linear to 0, or half a cosine to 0 at ``steps``.

    From the peak on these are the rates of transformers' ``get_scheduler``. Its warm-up begins with a step at 0, which trains
    nothing; ours with ``peak / warmup_steps``, so the peak is held for two steps.
    """

    peak: float
    shape: str = "constant"
    warmup_steps: int = 0
    steps: int = 1

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"schedule {self.shape!r} is unknown; take one of {', '.join(SHAPES)}")

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1. The last step still learns; 0 would be reached one later."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        share = min(1.0, (step - 1 - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.peak * (1 - share if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * share)))
