"""The port through which environment ranks and rollout ranks exchange batches."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, Protocol


class Channel(Protocol):
    """Queues of batches, one for each key.

    Items of a key arrive once each and in the order in which they were put. An item must not change
    after it was put.
    """

    def put(self, item: Any, key: str) -> None:
        """Queue an item. Returns at once; the item may still have to be sent."""
        ...

    async def get(self, key: str) -> Any:
        """Remove and return the oldest item of the key; wait for one if there is none. A cancelled
        call removes nothing."""
        ...


class MemoryChannel:
    """A :class:`Channel` within one event loop. Items are passed on without a copy."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)

    def put(self, item: Any, key: str) -> None:
        self._queues[key].put_nowait(item)

    async def get(self, key: str) -> Any:
        return await self._queues[key].get()

    def queued(self) -> dict[str, int]:
        """The number of items by key, of keys that have any."""
        return {key: queue.qsize() for key, queue in self._queues.items() if queue.qsize()}
