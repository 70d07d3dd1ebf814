"""The calls to code of the user: a span for each, and those that have not returned, so that a stall
can name them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.context import Context

from rollout.hosting.supervised import Condition
from rollout_workers.worker.telemetry import span

_SPANS = {"REWARD_CALL": "reward", "TOOL_CALL": "tool call", "TEACHER_CALL": "teacher"}


@dataclass(frozen=True, slots=True)
class Call:
    """One call. doing: ``REWARD_CALL``, ``TOOL_CALL``, or ``TEACHER_CALL``. rows: the rows (JSON)
    of its samples.
    limit: in seconds; 0: none. callers: the distinct trace contexts in which it was asked for;
    none: the current one.
    since: seconds since 1970."""

    doing: str
    name: str
    rows: tuple[bytes, ...]
    limit: float
    callers: tuple[Context, ...] = ()
    since: float = field(default_factory=time.time)


class Calls:
    """The open calls of a process. A call costs one entry of a dictionary; reading costs only the
    reader."""

    def __init__(self) -> None:
        self._open: dict[int, Call] = {}
        self._plugins: dict[str, Callable[[], Condition | None]] = {}

    def supervise(self, name: str, condition: Callable[[], Condition | None]) -> None:
        """Add a sidecar. name: as in its calls. condition: what is wrong with it now."""
        self._plugins[name] = condition

    def condition(self, name: str) -> Condition | None:
        """What is wrong with a sidecar; None if nothing is."""
        return self._plugins[name]() if name in self._plugins else None

    def conditions(self) -> dict[str, Condition]:
        """What is wrong with the sidecars, by name."""
        return {name: found for name in self._plugins if (found := self.condition(name)) is not None}

    @contextmanager
    def open(self, call: Call) -> Iterator[None]:
        """The call is open until the context ends."""
        self._open[id(call)] = call
        try:
            with span(_SPANS[call.doing], call.callers, function=call.name):
                yield
        finally:
            del self._open[id(call)]

    def of(self, row: bytes) -> Call | None:
        """The oldest open call for a row; None without one."""
        return min((call for call in self._open.values() if row in call.rows), key=lambda call: call.since, default=None)

    def oldest(self, doing: str) -> Call | None:
        """The oldest open call of a kind; None without one."""
        return min((call for call in self._open.values() if call.doing == doing), key=lambda call: call.since, default=None)
