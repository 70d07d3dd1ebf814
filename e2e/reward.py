"""A reward that an untrained model varies in: the share of digits in the answer. Every step has a
gradient, so a lost or repeated group, or one bit of difference, changes the weights digest."""

import time
from collections.abc import Sequence

from rollout.plugin import Sample


def digit_share(samples: Sequence[Sample]) -> list[float]:
    return [sum(c.isdigit() for c in sample.completion) / max(1, len(sample.completion)) for sample in samples]


def slow_digit_share(samples: Sequence[Sample]) -> list[float]:
    """The same from a reward that takes its time, so that a test has some between two steps."""
    time.sleep(0.5)
    return digit_share(samples)
