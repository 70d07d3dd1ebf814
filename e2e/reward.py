"""A reward that an untrained model varies in: the share of digits in the answer. Every step has a gradient, so a lost or
repeated group, or one bit of difference, changes the weights digest."""

from collections.abc import Sequence

from rollout.plugin import Sample


def digit_share(samples: Sequence[Sample]) -> list[float]:
    return [sum(c.isdigit() for c in sample.completion) / max(1, len(sample.completion)) for sample in samples]
