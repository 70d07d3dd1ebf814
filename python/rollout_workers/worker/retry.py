"""Trying on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

log = logging.getLogger(__name__)


async def again(complaint: str, *, first: float = 0.1, most: float = 1.0) -> AsyncIterator[int]:
    """Yield attempts without end, with growing waits in between; leave the loop on success. Logs
    ``complaint`` at the third."""
    attempt = 0
    while True:
        yield attempt
        attempt += 1
        if attempt == 3:
            log.warning("%s; trying on", complaint)
        await asyncio.sleep(min(most, first * 2**attempt))
