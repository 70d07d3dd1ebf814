"""Counts what a worker has done, in total and recently."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rollout_workers.engines.base import EngineStats

_WINDOW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one time, or the differences between two readings.

    busy: seconds in which the engine computed. forward: the part of them inside the model.
    """

    time: float
    samples: int
    tokens: int
    busy: float
    forward: float


def no_engine() -> EngineStats:
    """The counters of a process without an engine."""
    return EngineStats(0, 0, 0, False, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


class Throughput:
    """Counts finished samples and their completion tokens."""

    def __init__(self, engine: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self.samples = 0
        self.tokens = 0
        self._readings: deque[Reading] = deque([self.read()])

    def add(self, samples: int, tokens: int) -> None:
        self.samples += samples
        self.tokens += tokens

    def read(self) -> Reading:
        stats = self._engine()
        return Reading(self._clock(), self.samples, self.tokens, stats.busy_seconds, stats.forward_seconds)

    def tick(self) -> Reading:
        """Store a reading; call about once a second. Returns the differences to the previous
        one."""
        now, last = self.read(), self._readings[-1]
        self._readings.append(now)
        while now.time - self._readings[0].time > _WINDOW_SECONDS and len(self._readings) > 2:
            self._readings.popleft()
        return Reading(
            now.time - last.time,
            now.samples - last.samples,
            now.tokens - last.tokens,
            now.busy - last.busy,
            now.forward - last.forward,
        )

    def rates(self) -> tuple[float, float]:
        """Samples and tokens per second over the last seconds."""
        now, first = self.read(), self._readings[0]
        seconds = max(1e-9, now.time - first.time)
        return (now.samples - first.samples) / seconds, (now.tokens - first.tokens) / seconds
