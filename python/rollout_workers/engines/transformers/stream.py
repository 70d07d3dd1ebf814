"""Passes outputs from the decoding thread to asyncio with one wake-up per decoding step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from rollout_workers.engines.base import SampleDelta, SampleOutput

Item = SampleDelta | SampleOutput


class Stream:
    """The outputs of one ``generate`` call. ``put`` runs in the decoding thread, everything else in
    the event loop."""

    def __init__(self, outbox: Outbox, samples: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox
        self._left = samples
        self._items: deque[Item] = deque()
        self._arrived = asyncio.Event()

    def put(self, item: Item) -> None:
        self._outbox.add(self._loop, self, item)

    def deliver(self, item: Item) -> None:
        self._items.append(item)
        self._arrived.set()

    async def items(self) -> AsyncIterator[Item]:
        """Yield every item until each sample has its output."""
        while self._left:
            await self._arrived.wait()
            self._arrived.clear()
            while self._items:
                item = self._items.popleft()
                self._left -= isinstance(item, SampleOutput)
                yield item

    @property
    def drained(self) -> bool:
        """Whether each sample had its output."""
        return not self._left


class Outbox:
    """Collects the outputs of a turn until ``flush`` delivers them. Used by the decoding thread
    only."""

    def __init__(self) -> None:
        self._posts: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Item]]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, stream: Stream, item: Item) -> None:
        self._posts.setdefault(loop, []).append((stream, item))

    def flush(self) -> None:
        """Deliver everything, with one call per event loop. Drops the outputs for closed loops."""
        posts, self._posts = self._posts, {}
        for loop, items in posts.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:
                if not loop.is_closed():
                    raise


def _deliver(items: list[tuple[Stream, Item]]) -> None:
    for stream, item in items:
        stream.deliver(item)
