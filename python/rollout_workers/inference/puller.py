"""Which work is in hand: pulled as slots free up, held until the engine has the weights that it
asks for, and a slot for it.

What is held with its weights there was not begun: an idle worker may have it (``sharing``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from math import ceil

from rollout_workers.inference.receipt import Holdings
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.stream import WorkItem, WorkQueue, in_order

log = logging.getLogger(__name__)


class Puller:
    """Deals work out to ``begin`` in batches. Belongs to the worker's event loop."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        holdings: Holdings | None,
        *,
        capacity: int,
        slots: int | None = None,
        group_size: int = 1,
        prepare: Callable[[list[WorkItem]], None],
        begin: Callable[[list[WorkItem]], None],
    ) -> None:
        """capacity: groups whose samples may all be left to sample; one with some samples done
        counts for the rest of them, so that a few long ones do not idle the others' slots. slots:
        samples that the engine works on at a time; a group is begun when one of them is free (None:
        at once, and capacity is the most groups in hand). holdings: None where work needs no
        weights (data).

        prepare: called with each batch when it arrives, while the weights may still be on their
        way. begin: called when it may be sampled; must not block.
        """
        self._heartbeat, self._holdings = heartbeat, holdings
        self._capacity, self._slots, self._group_size = capacity, slots, group_size
        self._prepare, self._begin = prepare, begin
        self._queue: WorkQueue | None = None
        self._held: dict[str, WorkItem] = {}  # waits for weights, or for a slot
        self._active: dict[str, WorkItem] = {}
        self._left: dict[str, int] = {}  # samples of active groups that the engine has not finished
        self._modest = False  # another worker is idle: nothing is fetched ahead before the engine has caught up
        self._duplicates: dict[str, list[WorkItem]] = {}  # deliveries of items that are in hand already
        self._stopped = False
        self._watch: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def waiting(self) -> int:
        """Groups that wait for weights or a slot."""
        return len(self._held)

    @property
    def active(self) -> int:
        """Groups that are worked on."""
        return len(self._active)

    @property
    def free(self) -> int:
        """Samples that the engine could begin now. Negative: so many more than its slots were
        begun."""
        return (self._slots or 0) - sum(self._left.values())

    def untouched(self) -> list[WorkItem]:
        """What could be sampled, had the engine a slot for it; by position."""
        return in_order([item for item in self._held.values() if self._has_weights(item)])

    def start(self, queue: WorkQueue) -> None:
        """Begin to ask for work."""
        self._queue = queue
        if self._holdings is not None:
            self._watch = asyncio.create_task(self._follow_weights(self._holdings), name="puller")
        queue.set_room(self._capacity)

    def deliver(self, items: list[WorkItem]) -> None:
        """Take what arrived together."""
        fresh: list[WorkItem] = []
        for item in in_order(items):
            known = self._held.get(item.key) or self._active.get(item.key)
            if known is not None:
                self._duplicates.setdefault(item.key, []).append(item)
                continue
            self._held[item.key] = item
            fresh.append(item)
        self._ask()
        self._prepare(fresh)
        self._deal()

    async def done(self, items: list[WorkItem]) -> None:
        """These are finished: acknowledge them and make room."""
        self._end(items)
        self._deal()
        self._ask()
        if self._queue is not None:
            await self._queue.ack([delivery for item in items for delivery in (item, *self._duplicates.pop(item.key, ()))])

    async def drop(self, items: list[WorkItem]) -> None:
        """Give back items that failed here, for another worker."""
        self._end(items)
        if self._queue is not None:
            await self._queue.give_back([delivery for item in items for delivery in (item, *self._duplicates.pop(item.key, ()))])
        self._deal()
        self._ask()

    def sampled(self, key: str) -> None:
        """The engine has finished a sample of this group: there is a slot for another."""
        left = self._left.get(key, 0)
        if left > 1:
            self._left[key] = left - 1
        elif left:
            del self._left[key]
        self._modest = False
        self._deal()
        self._ask()

    async def share(self, groups: int, age: float) -> list[WorkItem]:
        """Give back at most this many groups that were not begun within ``age`` seconds, the last
        ones first, for a worker with free slots. Returns them."""
        before = time.monotonic() - age
        given = [item for item in self.untouched() if item.arrived < before][-groups:] if groups > 0 else []
        if self._queue is None or not given:
            return []
        self._modest = True
        for item in given:
            del self._held[item.key]
        self._ask()
        await self._queue.give_back([delivery for item in given for delivery in (item, *self._duplicates.pop(item.key, ()))])
        return given

    async def stop(self) -> None:
        """Stop pulling and give back the groups that were not begun. Active ones continue."""
        self._stopped = True
        if self._watch is not None:
            self._watch.cancel()
        if self._queue is None:
            return
        await self._queue.stop()
        held = list(self._held.values())
        self._held.clear()
        await self._queue.give_back([delivery for item in held for delivery in (item, *self._duplicates.pop(item.key, ()))])

    async def _follow_weights(self, holdings: Holdings) -> None:
        while True:
            holdings.changed.clear()
            self._deal()
            await holdings.changed.wait()

    def _deal(self) -> None:
        if self._stopped:
            return
        batch: list[WorkItem] = []
        for item in self.untouched():
            if self._slots is not None and self.free <= 0:
                break
            del self._held[item.key]
            self._active[item.key] = item
            self._left[item.key] = item.group.group_size
            batch.append(item)
        if batch:
            self.idle.clear()
            self._begin(batch)

    def _has_weights(self, item: WorkItem) -> bool:
        return self._holdings is None or item.group.min_version <= self._holdings.version

    def _end(self, items: list[WorkItem]) -> None:
        for item in items:
            self._active.pop(item.key, None)
            self._left.pop(item.key, None)
        if not self._active:
            self.idle.set()

    def _ask(self) -> None:
        if self._queue is not None and not self._stopped:
            self._queue.set_room(0 if self._modest and self.free <= 0 else max(0, self._wanted()))

    def _wanted(self) -> int:
        in_hand = len(self._held) + len(self._active)
        if self._slots is None:
            return self._capacity - in_hand
        left = sum(self._left.values()) + len(self._held) * self._group_size
        # Groups that are scored or published hold no slot: who is slow at that shall not pile them
        # up.
        return min(self._capacity - -(-left // self._group_size), max(self._capacity, self._slots) - in_hand)


def capacity(slots: int, group_size: int) -> int:
    """Groups in hand of an engine: enough to fill its slots, and a quarter more (at least one) so
    that a slot which falls free finds a group waiting."""
    full = ceil(slots / group_size)
    return full + max(1, full // 4)
