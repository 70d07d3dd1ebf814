"""Holds new requests of an engine back while the running ones finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from rollout_workers.engines.base import Engine, GroupRequest, SampleDelta, SampleOutput

_LOOK_SECONDS = 0.01


class Admission:
    """An ``Engine`` whose ``generate`` waits while ``drained`` is entered. Everything else is that
    of the wrapped engine. Belongs to the worker's event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = asyncio.Event()
        self._open.set()
        self._entering = 0  # calls whose requests the engine may not have counted yet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncGenerator[SampleDelta | SampleOutput, None]:
        """See ``Engine.generate``."""
        await self._open.wait()
        self._entering += 1
        entering = True
        try:
            async with aclosing(self._engine.generate(batch)) as items:  # type: ignore[type-var]
                async for item in items:
                    if entering:
                        entering = False
                        self._entering -= 1
                    yield item
        finally:
            if entering:
                self._entering -= 1

    @property
    def closed(self) -> bool:
        """Whether new requests wait."""
        return not self._open.is_set()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Hold new requests back, and enter when the engine has no request."""
        self._open.clear()
        try:
            while self._busy():
                await asyncio.sleep(_LOOK_SECONDS)  # the engine counts its requests in another thread
            yield
        finally:
            self._open.set()

    def _busy(self) -> bool:
        stats = self._engine.stats()
        return bool(self._entering or stats.active or stats.queued)
