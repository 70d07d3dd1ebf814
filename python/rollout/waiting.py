"""Why tasks of this process wait and ask again, for `rollout explain`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple


class Why(NamedTuple):
    """text: what happened last, such as ``the model at http://.. answers 503``. fix: what ends the
    wait. process: of this host that should answer; 0 if that is not known."""

    text: str
    fix: str
    process: int = 0


_WHY: weakref.WeakKeyDictionary[asyncio.Task[object], Why] = weakref.WeakKeyDictionary()


@contextmanager
def waits_for(text: str, fix: str, process: int = 0) -> Generator[None]:
    """The current task waits for this inside the block."""
    task = asyncio.current_task()
    if task is None:
        yield
        return
    _WHY[task] = Why(text, fix, process)
    try:
        yield
    finally:
        _WHY.pop(task, None)


def why(task: asyncio.Task[object]) -> Why | None:
    """Why a task waits; None if it has given no reason. May be called by any thread."""
    return _WHY.get(task)
