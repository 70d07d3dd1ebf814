"""Which work is in hand: pulled as slots free up, held until the engine has the weights that it asks for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import ceil

from rollout_workers.inference.receipt import Holdings
from rollout_workers.mesh.pulse import Pulse
from rollout_workers.mesh.stream import WorkItem, WorkQueue, in_order

log = logging.getLogger(__name__)


class Puller:
    """Deals work out to ``begin`` in batches. Belongs to the worker's event loop."""

    def __init__(
        self,
        pulse: Pulse,
        holdings: Holdings | None,
        *,
        capacity: int,
        prepare: Callable[[list[WorkItem]], None],
        begin: Callable[[list[WorkItem]], None],
    ) -> None:
        """capacity: most groups in hand. holdings: None where work needs no weights (data).

        prepare: called with each batch when it arrives, while the weights may still be on their way. begin: called when it may
        be sampled; must not block.
        """
        self._pulse, self._holdings = pulse, holdings
        self._capacity, self._prepare, self._begin = capacity, prepare, begin
        self._queue: WorkQueue | None = None
        self._held: dict[str, WorkItem] = {}  # waits for weights
        self._active: dict[str, WorkItem] = {}
        self._twins: dict[str, list[WorkItem]] = {}  # deliveries of items that are in hand already
        self._stopped = False
        self._watch: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def waiting(self) -> int:
        """Groups that wait for weights."""
        return len(self._held)

    @property
    def active(self) -> int:
        """Groups that are worked on."""
        return len(self._active)

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
                self._twins.setdefault(item.key, []).append(item)
                continue
            self._held[item.key] = item
            fresh.append(item)
        self._ask()
        self._prepare(fresh)
        self._deal()

    async def done(self, items: list[WorkItem]) -> None:
        """These are finished: acknowledge them and make room."""
        for item in items:
            self._active.pop(item.key, None)
        if not self._active:
            self.idle.set()
        self._ask()
        if self._queue is not None:
            await self._queue.ack([twin for item in items for twin in (item, *self._twins.pop(item.key, ()))])

    async def drop(self, items: list[WorkItem]) -> None:
        """These could not be done here: somebody else shall have them."""
        for item in items:
            self._active.pop(item.key, None)
        if not self._active:
            self.idle.set()
        if self._queue is not None:
            await self._queue.give_back([twin for item in items for twin in (item, *self._twins.pop(item.key, ()))])
        self._ask()

    async def stop(self) -> None:
        """Ask for no more and give back what was not begun. What is active goes on."""
        self._stopped = True
        if self._watch is not None:
            self._watch.cancel()
        if self._queue is None:
            return
        await self._queue.stop()
        held = list(self._held.values())
        self._held.clear()
        await self._queue.give_back([twin for item in held for twin in (item, *self._twins.pop(item.key, ()))])

    async def _follow_weights(self, holdings: Holdings) -> None:
        while True:
            holdings.changed.clear()
            self._deal()
            await holdings.changed.wait()

    def _deal(self) -> None:
        if self._stopped:
            return
        version = self._holdings.version if self._holdings is not None else None
        batch = [i for i in self._held.values() if version is None or i.group.min_version <= version]
        if not batch:
            return
        for item in batch:
            del self._held[item.key]
            self._active[item.key] = item
        self.idle.clear()
        self._begin(in_order(batch))

    def _ask(self) -> None:
        if self._queue is not None and not self._stopped:
            self._queue.set_room(max(0, self._capacity - len(self._held) - len(self._active)))


def capacity(slots: int, group_size: int) -> int:
    """Groups in hand of an engine: enough to fill its slots, and a quarter more (at least one) so that a slot which falls free
    finds a group waiting."""
    full = ceil(slots / group_size)
    return full + max(1, full // 4)
