"""Warnings that come again and again: the first goes out at once, those like it together, with how
many they are."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

EVERY_SECONDS = 10.0
_MOST_KINDS = 1_000
# What varies from case to case: numbers, and what stands in quotes (an apostrophe inside a word is
# none).
_VARIES = re.compile(r"\B'[^']*'|\"[^\"]*\"|[0-9]+")


@dataclass(slots=True)
class _Kind(Generic[T]):
    sent: float  # monotonic seconds
    count: int = 0  # held back since then
    last: T | None = None  # the newest of those


class Repeats(Generic[T]):
    """Decides which of many items go out. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[str, _Kind[T]] = {}
        self._lock = threading.Lock()

    def admit(self, source: str, message: str, item: T) -> bool:
        """Whether the item goes out now; else it is counted, and the newest of its kind comes back
        from ``due``."""
        key = f"{source}\0{_VARIES.sub('#', message.partition(chr(10))[0])}"
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                if len(self._kinds) >= _MOST_KINDS:
                    return True
                self._kinds[key] = _Kind(self._clock())
                return True
            kind.count += 1
            kind.last = item
            return False

    def due(self, *, all: bool = False) -> Iterator[tuple[T, int]]:
        """Items that stand for all of their kind that were held back, ten seconds after one went
        out; with ``all`` at once. A kind that stayed quiet as long is forgotten, so that its next
        item goes out at once."""
        with self._lock:
            now = self._clock()
            out: list[tuple[T, int]] = []
            for key, kind in list(self._kinds.items()):
                if now < kind.sent + EVERY_SECONDS and not all:
                    continue
                if kind.last is None:
                    del self._kinds[key]
                    continue
                out.append((kind.last, kind.count))
                kind.sent, kind.count, kind.last = now, 0, None
        yield from out
