"""Decides which work items to pull and when to start them.

Items are pulled as slots free up. An item waits until the engine has the weights that it requires
and a free slot. While it waits, another worker that is idle may get it instead (``sharing``). While
the engine is paused, no item waits here: other workers get them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from math import ceil

from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.worker.stream import WorkItem, WorkQueue, in_order

log = logging.getLogger(__name__)


class Puller:
    """Pulls work items and starts them in batches. All methods run on the worker's event loop."""

    def __init__(
        self,
        receipts: EngineReceipts | None,
        *,
        capacity: int,
        slots: int | None = None,
        group_size: int = 1,
        prepare: Callable[[list[WorkItem]], None],
    ) -> None:
        """capacity: the most groups whose samples are all unfinished. A partly sampled group counts
        for its unfinished samples only, so that a few long samples do not keep slots idle. slots:
        samples that the engine computes concurrently; a group starts when one of them is free.
        None: groups start at once, and ``capacity`` limits the number of unfinished groups.
        receipts: None if items need no weights.

        prepare: called with each batch when it arrives, possibly before its weights arrive; must
        not block.
        """
        self._receipts = receipts
        self._capacity, self._slots, self._group_size = capacity, slots, group_size
        self._prepare = prepare
        self._queue: WorkQueue | None = None
        self._begin: Callable[[list[WorkItem]], None] = _begin_nothing
        self._waiting: dict[str, WorkItem] = {}  # waiting for weights or a slot
        self._active: dict[str, WorkItem] = {}
        self._samples_left: dict[str, int] = {}  # samples of active groups that the engine has not finished
        self._no_prefetch = False  # set while another worker is idle: request nothing until a slot is free
        self._outdated = False  # set when a worker with newer weights was given work: request nothing until they arrive
        self._duplicates: dict[str, list[WorkItem]] = {}  # further deliveries of items that wait or are active
        self._stopped = self._paused = False
        self._returning: set[asyncio.Task[None]] = set()  # that give back items which arrived during a pause
        self._weights_watch: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def waiting(self) -> int:
        """Number of groups that wait for weights or a slot."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Number of groups that were started and are unfinished."""
        return len(self._active)

    def waiting_items(self) -> list[tuple[WorkItem, bool]]:
        """The groups that wait, each with whether it waits for weights."""
        return [(item, not self._has_weights(item)) for item in self._waiting.values()]

    def active_items(self) -> list[WorkItem]:
        """The groups that were started and are unfinished."""
        return list(self._active.values())

    @property
    def paused(self) -> bool:
        """Whether groups are neither requested nor started."""
        return self._paused

    @property
    def free(self) -> int:
        """Number of free slots for samples. Negative if more samples were started than there are
        slots."""
        return (self._slots or 0) - sum(self._samples_left.values())

    def ready(self) -> list[WorkItem]:
        """The waiting items whose weights are loaded, by position."""
        return in_order([item for item in self._waiting.values() if self._has_weights(item)])

    def start(self, queue: WorkQueue, begin: Callable[[list[WorkItem]], None]) -> None:
        """Start to request work. begin: called with each batch of items to start; must not
        block."""
        self._queue, self._begin = queue, begin
        if self._receipts is not None:
            self._weights_watch = asyncio.create_task(self._follow_weights(self._receipts), name="puller")
        self._request_more()

    async def pause(self) -> None:
        """Start no group and request none until ``resume``, and give back those that wait. Active
        ones continue. Items that need no weights need no engine: nothing changes for them.
        Idempotent."""
        if self._receipts is None:
            return
        self._paused = True
        self._request_more()
        await self._release_waiting()

    def resume(self) -> None:
        """Request groups again. Idempotent."""
        self._paused = False
        self._begin_ready()
        self._request_more()

    def deliver(self, items: list[WorkItem]) -> None:
        """Add items that arrived together."""
        fresh: list[WorkItem] = []
        for item in in_order(items):
            if item.key in self._waiting or item.key in self._active:
                self._duplicates.setdefault(item.key, []).append(item)
                continue
            self._waiting[item.key] = item
            fresh.append(item)
        self._request_more()
        if self._paused:  # they were requested before
            returning = asyncio.create_task(self._release_waiting(), name="puller")
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)
            return
        self._prepare(fresh)
        self._begin_ready()

    async def done(self, items: list[WorkItem]) -> None:
        """Acknowledge finished items and request more."""
        self._forget(items)
        self._begin_ready()
        self._request_more()
        if self._queue is not None:
            await self._queue.ack(self._with_duplicates(items))

    async def drop(self, items: list[WorkItem]) -> None:
        """Give back items that failed here, so that another worker gets them."""
        self._forget(items)
        if self._queue is not None:
            await self._queue.give_back(self._with_duplicates(items))
        self._begin_ready()
        self._request_more()

    def sampled(self, key: str) -> None:
        """Record that the engine finished a sample of this group, which frees a slot."""
        left = self._samples_left.get(key, 0)
        if left > 1:
            self._samples_left[key] = left - 1
        elif left:
            del self._samples_left[key]
        self._no_prefetch = False
        self._begin_ready()
        self._request_more()

    def overdue(self, age: float) -> bool:
        """Whether a group has waited for its weights for more than ``age`` seconds."""
        before = time.monotonic() - age
        return any(item.arrived < before and not self._has_weights(item) for item in self._waiting.values())

    async def share(self, groups: int, age: float, version: int | None = None) -> list[WorkItem]:
        """Give back up to ``groups`` groups that have waited for more than ``age`` seconds, the
        last ones first, for a worker with free slots. Returns them. version: of the weights of that
        worker; it also gets groups for which those here are too old."""
        before = time.monotonic() - age
        usable = self.ready()
        if version is not None and self._receipts is not None and version > self._receipts.version:
            usable = in_order([item for item in self._waiting.values() if item.group.min_version <= version])
        given = [item for item in usable if item.arrived < before][-groups:] if groups > 0 else []
        if self._queue is None or not given:
            return []
        self._no_prefetch = True
        self._outdated = self._outdated or not all(self._has_weights(item) for item in given)
        for item in given:
            del self._waiting[item.key]
        self._request_more()
        await self._queue.give_back(self._with_duplicates(given))
        return given

    async def stop(self) -> None:
        """Stop pulling and give back the groups that were not started. Active ones continue."""
        self._stopped = True
        if self._weights_watch is not None:
            self._weights_watch.cancel()
        if self._queue is None:
            return
        await self._queue.stop()
        await self._release_waiting()

    async def _release_waiting(self) -> None:
        waiting = list(self._waiting.values())
        self._waiting.clear()
        if self._queue is not None and waiting:
            await self._queue.give_back(self._with_duplicates(waiting))

    async def _follow_weights(self, receipts: EngineReceipts) -> None:
        while True:
            receipts.changed.clear()
            self._begin_ready()
            if self._outdated:
                self._outdated = False
                self._request_more()
            await receipts.changed.wait()

    def _begin_ready(self) -> None:
        if self._stopped or self._paused:
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
        return self._receipts is None or item.group.min_version <= self._receipts.version

    def _forget(self, items: list[WorkItem]) -> None:
        for item in items:
            self._active.pop(item.key, None)
            self._samples_left.pop(item.key, None)
        if not self._active:
            self.idle.set()

    def _request_more(self) -> None:
        if self._queue is not None and not self._stopped:
            none = self._paused or self._outdated or (self._no_prefetch and self.free <= 0)
            self._queue.set_room(0 if none else max(0, self._wanted()))

    def _wanted(self) -> int:
        unfinished = len(self._waiting) + len(self._active)
        if self._slots is None:
            return self._capacity - unfinished
        left = sum(self._samples_left.values()) + len(self._waiting) * self._group_size
        # Groups that are scored or published need no slot. Limit them too, so that they do not pile
        # up if scoring or publishing is slow.
        return min(self._capacity - -(-left // self._group_size), max(self._capacity, self._slots) - unfinished)


def _begin_nothing(items: list[WorkItem]) -> None:
    raise RuntimeError(f"{len(items)} groups arrived before Puller.start")


def capacity(slots: int, group_size: int) -> int:
    """The number of groups to hold for an engine: enough to fill its slots, and a quarter more (at
    least one), so that a group is ready when a slot becomes free."""
    full = ceil(slots / group_size)
    return full + max(1, full // 4)
