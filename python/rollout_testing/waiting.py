"""Waits for conditions without fixed sleeps."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def until(what: Callable[[], Any | Awaitable[Any]], seconds: float = 60.0) -> Any:
    """The first true value of ``what``. Raises ``TimeoutError`` after a limit that is long enough
    for a busy machine."""
    deadline = time.monotonic() + seconds
    while True:
        value = what()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} is still {value!r} after {seconds:g} s")
        await asyncio.sleep(0.005)
