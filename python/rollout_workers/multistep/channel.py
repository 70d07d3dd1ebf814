"""The port through which environment ranks and rollout ranks exchange batches.

``MemoryChannel`` here is for ranks of one process, ``NatsChannel`` in ``nats_channel.py`` for
others. ``rollout_testing.channeltest`` is the suite that both pass.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from typing import Any, Protocol

from rollout_workers.multistep.errors import ChannelClosed, ChannelFull

CAPACITY = 64
"""Items of a key that a sender may put before the receiver takes one."""


class Exchange(Protocol):
    """The part of a :class:`Channel` through which a rank sends and receives."""

    def put(self, item: Any, key: str) -> None:
        """See :class:`Channel`."""
        ...

    async def get(self, key: str) -> Any:
        """See :class:`Channel`."""
        ...


class Channel(Exchange, Protocol):
    """Queues of items, one for each key. A key has one sender and one receiver.

    Items of a key arrive once each and in the order in which they were put. An item must not change
    after it was put. If a process takes the place of a receiver, it gets the items that the former
    one had not acknowledged, so an item may have been taken in both.
    """

    def put(self, item: Any, key: str) -> None:
        """Queue an item. Returns at once; the item may still have to be sent. Raises
        :class:`ChannelFull` if the receiver has to take an item first, :class:`ChannelClosed`, and
        :class:`BatchInvalid` for an item that can't be sent."""
        ...

    async def room(self, key: str) -> None:
        """Wait until ``put`` accepts an item of the key. Raises :class:`ChannelClosed`, and
        :class:`PeerLost` if the receiver shows no life."""
        ...

    async def get(self, key: str) -> Any:
        """Remove and return the oldest item of the key; wait for one if there is none. A cancelled
        call removes nothing.

        Raises :class:`ChannelClosed` when no item is left and the sender has closed, once for each
        sender; a later call waits for a process that takes its place. Raises :class:`PeerLost` if
        no sender shows life.
        """
        ...

    async def close(self) -> None:
        """End the use of the channel, after the items that were put have arrived. Raises
        :class:`PeerLost` if one has not within a limit. Idempotent."""
        ...


class MemoryChannel:
    """A :class:`Channel` within one event loop, which both sides share. Items are passed on without
    a copy."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._queues: dict[str, deque[Any]] = defaultdict(deque)
        self._waiters: dict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self._closed = False

    def put(self, item: Any, key: str) -> None:
        if self._closed:
            raise ChannelClosed(key)
        if len(self._queues[key]) >= self._capacity:
            raise ChannelFull(key, self._capacity)
        self._queues[key].append(item)
        self._notify(key)

    async def room(self, key: str) -> None:
        while not self._closed and len(self._queues[key]) >= self._capacity:
            await self._wait(key)
        if self._closed:
            raise ChannelClosed(key)

    async def get(self, key: str) -> Any:
        queue = self._queues[key]
        while not queue:
            if self._closed:
                raise ChannelClosed(key)
            await self._wait(key)
        self._notify(key)
        return queue.popleft()

    async def close(self) -> None:
        self._closed = True
        for key in list(self._waiters):
            self._notify(key)

    def queued(self) -> dict[str, int]:
        """The number of items by key, of keys that have any."""
        return {key: len(queue) for key, queue in self._queues.items() if queue}

    async def _wait(self, key: str) -> None:
        """Until something of the key has changed."""
        changed = asyncio.get_running_loop().create_future()
        self._waiters[key].append(changed)
        await changed

    def _notify(self, key: str) -> None:
        for changed in self._waiters.pop(key, []):
            if not changed.done():
                changed.set_result(None)
