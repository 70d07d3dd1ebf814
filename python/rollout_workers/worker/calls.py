"""The calls to code of the user that have not returned, so that a stall can name them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Call:
    """One call. doing: ``REWARD`` or ``TOOL_CALL``. rows: the rows (JSON) of its samples. limit: in
    seconds. since: seconds since 1970."""

    doing: str
    name: str
    rows: tuple[bytes, ...]
    limit: float
    since: float = field(default_factory=time.time)


class Calls:
    """The open calls of a process. A call costs one entry of a dictionary; reading costs only the
    reader."""

    def __init__(self) -> None:
        self._open: dict[int, Call] = {}

    @contextmanager
    def open(self, call: Call) -> Iterator[None]:
        """The call is open until the context ends."""
        self._open[id(call)] = call
        try:
            yield
        finally:
            del self._open[id(call)]

    def of(self, row: bytes) -> Call | None:
        """The oldest open call for a row; None without one."""
        return min((call for call in self._open.values() if row in call.rows), key=lambda call: call.since, default=None)
