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
from rollout_workers.worker.stream import WorkItem, WorkQueue, in_order

log = logging.getLogger(__name__)


class Puller:
    """Passes work items to ``begin`` in batches. All methods run on the worker's event loop."""

    def __init__(
        self,
        holdings: Holdings | None,
        *,
        capacity: int,
        slots: int | None = None,
        group_size: int = 1,
        prepare: Callable[[list[WorkItem]], None],
    ) -> None:
        """capacity: groups whose samples may all be left to sample; one with some samples done
        counts for the rest of them, so that a few long ones do not idle the others' slots. slots:
        samples that the engine works on at a time; a group is begun when one of them is free (None:
        at once, and capacity is the most groups in hand). holdings: None where work needs no
        weights (data).

        prepare: called with each batch when it arrives, possibly before its weights arrive; must
        not block.
        """
        self._holdings = holdings
        self._capacity, self._slots, self._group_size = capacity, slots, group_size
        self._prepare = prepare
        self._queue: WorkQueue | None = None
        self._begin: Callable[[list[WorkItem]], None] = _begin_nothing
        self._waiting: dict[str, WorkItem] = {}  # waits for weights, or for a slot
        self._active: dict[str, WorkItem] = {}
        self._samples_left: dict[str, int] = {}  # samples of active groups that the engine has not finished
        self._no_prefetch = False  # another worker is idle: request nothing until a slot is free
        self._duplicates: dict[str, list[WorkItem]] = {}  # deliveries of items that are in hand already
        self._stopped = False
        self._weights_watch: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def waiting(self) -> int:
        """Groups that wait for weights or a slot."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Groups that are worked on."""
        return len(self._active)

    @property
    def free(self) -> int:
        """Samples that the engine could begin now. Negative: so many more than its slots were
        begun."""
        return (self._slots or 0) - sum(self._samples_left.values())

    def ready(self) -> list[WorkItem]:
        """What could be sampled, had the engine a slot for it; by position."""
        return in_order([item for item in self._waiting.values() if self._has_weights(item)])

    def start(self, queue: WorkQueue, begin: Callable[[list[WorkItem]], None]) -> None:
        """Start to request work. begin: called with each batch that may be sampled; must not
        block."""
        self._queue, self._begin = queue, begin
        if self._holdings is not None:
            self._weights_watch = asyncio.create_task(self._follow_weights(self._holdings), name="puller")
        queue.set_room(self._capacity)

    def deliver(self, items: list[WorkItem]) -> None:
        """Take what arrived together."""
        fresh: list[WorkItem] = []
        for item in in_order(items):
            if item.key in self._waiting or item.key in self._active:
                self._duplicates.setdefault(item.key, []).append(item)
                continue
            self._waiting[item.key] = item
            fresh.append(item)
        self._ask()
        self._prepare(fresh)
        self._begin_ready()

    async def done(self, items: list[WorkItem]) -> None:
        """These are finished: acknowledge them and make room."""
        self._end(items)
        self._begin_ready()
        self._ask()
        if self._queue is not None:
            await self._queue.ack(self._with_duplicates(items))

    async def drop(self, items: list[WorkItem]) -> None:
        """Give back items that failed here, for another worker."""
        self._end(items)
        if self._queue is not None:
            await self._queue.give_back(self._with_duplicates(items))
        self._begin_ready()
        self._ask()

    def sampled(self, key: str) -> None:
        """The engine has finished a sample of this group: there is a slot for another."""
        left = self._samples_left.get(key, 0)
        if left > 1:
            self._samples_left[key] = left - 1
        elif left:
            del self._samples_left[key]
        self._no_prefetch = False
        self._begin_ready()
        self._ask()

    async def share(self, groups: int, age: float) -> list[WorkItem]:
        """Give back at most this many groups that were not begun within ``age`` seconds, the last
        ones first, for a worker with free slots. Returns them."""
        before = time.monotonic() - age
        given = [item for item in self.ready() if item.arrived < before][-groups:] if groups > 0 else []
        if self._queue is None or not given:
            return []
        self._no_prefetch = True
        for item in given:
            del self._waiting[item.key]
        self._ask()
        await self._queue.give_back(self._with_duplicates(given))
        return given

    async def stop(self) -> None:
        """Stop pulling and give back the groups that were not begun. Active ones continue."""
        self._stopped = True
        if self._weights_watch is not None:
            self._weights_watch.cancel()
        if self._queue is None:
            return
        await self._queue.stop()
        waiting = list(self._waiting.values())
        self._waiting.clear()
        await self._queue.give_back(self._with_duplicates(waiting))

    async def _follow_weights(self, holdings: Holdings) -> None:
        while True:
            holdings.changed.clear()
            self._begin_ready()
            await holdings.changed.wait()

    def _begin_ready(self) -> None:
        if self._stopped:
            return
        batch: list[WorkItem] = []
        for item in self.ready():
            if self._slots is not None and self.free <= 0:
                break
            del self._waiting[item.key]
            self._active[item.key] = item
            self._samples_left[item.key] = item.group.group_size
            batch.append(item)
        if batch:
            self.idle.clear()
            self._begin(batch)

    def _with_duplicates(self, items: list[WorkItem]) -> list[WorkItem]:
        return [delivery for item in items for delivery in (item, *self._duplicates.pop(item.key, ()))]

    def _has_weights(self, item: WorkItem) -> bool:
        return self._holdings is None or item.group.min_version <= self._holdings.version

    def _end(self, items: list[WorkItem]) -> None:
        for item in items:
            self._active.pop(item.key, None)
            self._samples_left.pop(item.key, None)
        if not self._active:
            self.idle.set()

    def _ask(self) -> None:
        if self._queue is not None and not self._stopped:
            self._queue.set_room(0 if self._no_prefetch and self.free <= 0 else max(0, self._wanted()))

    def _wanted(self) -> int:
        in_hand = len(self._waiting) + len(self._active)
        if self._slots is None:
            return self._capacity - in_hand
        left = sum(self._samples_left.values()) + len(self._waiting) * self._group_size
        # Groups that are scored or published hold no slot: who is slow at that shall not pile them
        # up.
        return min(self._capacity - -(-left // self._group_size), max(self._capacity, self._slots) - in_hand)


def _begin_nothing(items: list[WorkItem]) -> None:
    raise RuntimeError(f"{len(items)} groups arrived before Puller.start")


def capacity(slots: int, group_size: int) -> int:
    """Groups in hand of an engine: enough to fill its slots, and a quarter more (at least one) so
    that a slot which falls free finds a group waiting."""
    full = ceil(slots / group_size)
    return full + max(1, full // 4)
