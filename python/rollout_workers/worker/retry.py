"""Trying on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

log = logging.getLogger(__name__)


async def again(complaint: str, *, first: float = 0.1, most: float = 1.0) -> AsyncIterator[int]:
    """Attempts for ever, with growing waits in between; leave the loop on success. The third one is told in the log."""
    attempt = 0
    while True:
        yield attempt
        attempt += 1
        if attempt == 3:
            log.warning("%s; trying on", complaint)
        await asyncio.sleep(min(most, first * 2**attempt))
