"""What is added up while a step is made: its updates, and the seconds of their phases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Updates:
    """What the updates of a step have in common."""

    def __init__(self) -> None:
        self.count = 0
        self._loss = self._norm = self._computed = self._critic = 0.0

    def add(self, loss: float, norms: Sequence[float], computed: int) -> None:
        """One more. norms: of the policy's gradient, and of the critic's where it has its own."""
        self.count += 1
        self._loss, self._norm, self._computed = self._loss + loss, self._norm + norms[0], self._computed + computed
        self._critic += sum(norms[1:])

    def metrics(self) -> dict[str, float]:
        """Means over the updates."""
        told = {"loss": self._loss / self.count, "grad_norm": self._norm / self.count, "tokens/computed": self._computed}
        if self._critic:
            told["value/grad_norm"] = self._critic / self.count
        return told | ({"updates": float(self.count)} if self.count > 1 else {})


class Clock:
    """Adds up the seconds of the phases of a step."""

    def __init__(self) -> None:
        self._seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count what is done inside ``with``, on the GPU too, for a phase."""
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[phase] += time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """``time/<phase>`` of each."""
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
