"""Combines several rewards into one by a weighted sum."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rollout.environment import Result
from rollout.plugin import flaw
from rollout_workers.rewards.rewards import RewardGroup, Scorer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """One of several rewards."""

    name: str
    weight: float
    scorer: Scorer


class Composite:
    """A :class:`Scorer` that adds the weighted rewards of others, which it calls concurrently.

    The metrics of a sample are ``reward/NAME`` (the unweighted reward of each part) and
    ``NAME/METRIC`` (the metrics of the parts). If a part fails, the sample fails with the reason of
    the first failed part, because the sum would not be comparable without it.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)

    @property
    def failures(self) -> int:
        return sum(part.scorer.failures for part in self._parts)

    @property
    def retries(self) -> int:
        return sum(part.scorer.retries for part in self._parts)

    @property
    def waiting_seconds(self) -> float:
        return max(part.scorer.waiting_seconds for part in self._parts)

    async def start(self) -> None:
        """Start all parts. Raises the first ``RewardError``; call ``close`` to stop the parts that
        did start."""
        await asyncio.gather(*(part.scorer.start() for part in self._parts))

    async def score(self, groups: Sequence[RewardGroup]) -> list[list[Result]]:
        """One list of results per group, in order."""
        found = await asyncio.gather(*(part.scorer.score(groups) for part in self._parts))
        return [
            [self._sum([scored[g][s] for scored in found]) for s in range(len(group.samples))] for g, group in enumerate(groups)
        ]

    async def close(self) -> None:
        """Close all parts."""
        await asyncio.gather(*(part.scorer.close() for part in self._parts))

    def _sum(self, results: Sequence[Result]) -> Result:
        for result in results:
            if result.outcome != "completed":
                return result
        metrics: dict[str, float] = {}
        for part, result in zip(self._parts, results, strict=True):
            metrics[f"reward/{part.name}"] = result.reward
            metrics |= _named(part.name, result.metrics)
        weights = [part.weight for part in self._parts]
        total = sum(weight * result.reward for weight, result in zip(weights, results, strict=True))
        if why := flaw(total):
            log.warning("the weighted sum of the rewards is %s: the sample is INFRA_FAILED", why)
            return Result(outcome="infra_failed", reason="REWARD_BAD_RESULT")
        return Result(
            total,
            metrics,
            token_rewards=_weighted([[w * r for r in result.token_rewards] for w, result in zip(weights, results, strict=True)]),
            steps=tuple(
                replace(step, reward=w * step.reward) for w, result in zip(weights, results, strict=True) for step in result.steps
            ),
        )


def _named(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}/{metric}": value for metric, value in metrics.items()}


def _weighted(parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The weighted sum for each token. A part without token rewards adds nothing."""
    return tuple(sum(values) for values in zip_longest(*parts, fillvalue=0.0))
