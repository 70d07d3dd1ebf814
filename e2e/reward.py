"""A reward that varies for an untrained model: the share of digits in the answer. Every step has a
gradient, so a lost or repeated group, or one different bit, changes the weights digest."""

import time
from collections.abc import Sequence

from rollout.plugin import Sample


def digit_share(samples: Sequence[Sample]) -> list[float]:
    return [sum(c.isdigit() for c in sample.completion) / max(1, len(sample.completion)) for sample in samples]


def slow_digit_share(samples: Sequence[Sample]) -> list[float]:
    """The same reward, but slow, so that tests have time between two steps."""
    time.sleep(0.5)
    return digit_share(samples)
