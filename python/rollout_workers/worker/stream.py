"""Pulls work items from JetStream as capacity frees up, extends their ack deadline with progress
acks, and acknowledges them when they are done.

A worker always has pull requests open for as many items as it has room for, so JetStream delivers
a published item at once. It distributes the items among the open requests of all workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from rollout import names
from rollout.run.v1.run_pb2 import PromptGroup
from rollout_workers.worker.bus import ResponderWatch
from rollout_workers.worker.heartbeat import Heartbeat

log = logging.getLogger(__name__)

EXPIRES_SECONDS = 20.0
HEARTBEAT_SECONDS = 2.0
_MISSING_RETRY_SECONDS = 0.25
_DRAIN_SECONDS = 2.0
_ACK = b"+ACK"
_NAK = b"-NAK"


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """A delivered prompt group. deliveries: above 1 if an earlier delivery was not finished.
    arrived: monotonic seconds."""

    group: PromptGroup
    reply: str
    deliveries: int
    headers: dict[str, str] = field(default_factory=dict)
    arrived: float = 0.0

    @property
    def key(self) -> str:
        """``<epoch>/<index>/<attempt>``."""
        return f"{self.group.epoch}/{self.group.index}/{self.group.attempt}"


class _Requests:
    """Counts the requested items that have not arrived yet.

    An item does not name the pull request that it answers, so it is counted for the oldest request.
    When a request ends, the server reports how many items it did not send, which corrects the
    counts. The total is always right.
    """

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    @property
    def items(self) -> int:
        return sum(self._left.values())

    def open(self, name: str, items: int) -> None:
        self._left[name] = items

    def received(self) -> None:
        self._take(1)

    def ended(self, name: str, missing: int) -> None:
        """Record that the server closed a request without sending ``missing`` of its items."""
        booked = self._left.pop(name, 0)
        if booked < missing:
            self._take(missing - booked)
        elif booked > missing and self._left:
            self._left[next(iter(self._left))] += booked - missing

    def clear(self) -> None:
        self._left.clear()

    def _take(self, items: int) -> None:
        for name in list(self._left):
            taken = min(items, self._left[name])
            self._left[name] -= taken
            items -= taken
            if not self._left[name]:
                del self._left[name]
            if not items:
                return


class WorkQueue:
    """Pulls work items of one run. All methods belong to the worker's event loop."""

    def __init__(self, client: Client, heartbeat: Heartbeat, stream: str, deliver: Callable[[list[WorkItem]], None]) -> None:
        """deliver: called on the event loop with the items that arrived together; must not
        block."""
        self._client, self._heartbeat, self._stream, self._deliver = client, heartbeat, stream, deliver
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{names.WORKERS_CONSUMER}"
        self._inbox = client.new_inbox()
        self._requests = _Requests()
        self._requested: dict[str, int] = {}  # items by request, for recent requests
        self._last_received = 0.0  # monotonic seconds
        self._room = 0
        self._serial = 0
        self._arrived: list[WorkItem] = []
        self._wake = asyncio.Event()
        self._missing_since = 0.0
        self._missing = False  # no server found the stream since the last item arrived
        self._responders = ResponderWatch(client, stream)
        self._task: asyncio.Task[None] | None = None
        self._subscription: Subscription | None = None

    @property
    def outstanding(self) -> int:
        """The number of requested items that have not arrived."""
        return self._requests.items

    async def start(self) -> None:
        """Subscribe to the inbox. Items are requested after ``set_room``."""
        self._subscription = await self._client.subscribe(f"{self._inbox}.*", cb=self._receive, pending_msgs_limit=1 << 16)
        self._task = asyncio.create_task(self._keep_requesting(), name="work-queue")

    def set_room(self, items: int) -> None:
        """Set how many more items there is room for, and request that many. Items that were
        requested before may still arrive if there is less room now."""
        self._room = items
        if items > self.outstanding:
            self._wake.set()

    def reconnected(self) -> None:
        """Request the items again, because the server dropped the requests of the lost
        connection."""
        self._requests.clear()
        self._wake.set()

    async def ack(self, items: Iterable[WorkItem]) -> None:
        """Mark items as done, so that they are not delivered again."""
        await self._settle(items, _ACK)

    async def give_back(self, items: Iterable[WorkItem]) -> None:
        """Return unfinished items to the stream, which delivers them to another worker at once."""
        await self._settle(items, _NAK)

    async def stop(self) -> None:
        """Request no more items, and give back those that still arrive. After this returns, the
        server delivers items that are given back to other workers only."""
        self._room = 0
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._requests.clear()
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            try:
                async with asyncio.timeout(_DRAIN_SECONDS):
                    await subscription.drain()
            except (NatsError, TimeoutError) as error:  # not connected, so nothing arrives either
                log.debug("stop listening to %s: %r", self._stream, error)

    async def _settle(self, items: Iterable[WorkItem], verdict: bytes) -> None:
        for item in items:
            self._heartbeat.release(item.reply)
            try:
                await self._client.publish(item.reply, verdict)
            except NatsError as error:  # the item is delivered again, and the buffer drops duplicates
                log.debug("settle %s: %r", item.key, error)

    async def _keep_requesting(self) -> None:
        while True:
            now = time.monotonic()
            if (
                self.outstanding and now > self._last_received + 3 * HEARTBEAT_SECONDS
            ):  # no heartbeat: the server dropped the requests
                self._requests.clear()
            waiting = max(0.0, self._missing_since + _MISSING_RETRY_SECONDS - now)
            wanted = self._room - self.outstanding
            if wanted > 0 and not waiting and (wanted >= self._room // 4 or not self.outstanding):
                await self._request(wanted)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(waiting or HEARTBEAT_SECONDS):
                    await self._wake.wait()

    async def _request(self, items: int) -> None:
        self._serial += 1
        name = f"{self._inbox}.{self._serial}"
        body = {
            "batch": items,
            "expires": int(EXPIRES_SECONDS * 1e9),
            "idle_heartbeat": int(HEARTBEAT_SECONDS * 1e9),
        }
        self._requests.open(name, items)
        self._requested = {name: items, **dict(list(self._requested.items())[:64])}
        self._last_received = time.monotonic()
        try:
            await self._client.publish(self._next, json.dumps(body).encode(), reply=name)
        except NatsError as error:
            log.debug("pull: %r", error)
            self._requests.ended(name, items)

    async def _receive(self, message: Msg) -> None:
        self._last_received = time.monotonic()
        status = (message.headers or {}).get("Status")
        if status is not None and not message.reply:
            self._handle_status(message.subject, status, message.headers or {})
            await self._responders.record(status == "503")
            return
        await self._responders.record(False)
        self._requests.received()
        item = self._read(message)
        if item is None:
            return
        self._heartbeat.hold(item.reply)
        self._missing = False
        if self._task is None:
            await self.give_back([item])
            return
        self._arrived.append(item)
        if len(self._arrived) == 1:  # runs after the messages that are already in the socket
            asyncio.get_running_loop().call_soon(self._deliver_arrived)

    def _deliver_arrived(self) -> None:
        items, self._arrived = self._arrived, []
        if items:
            self._deliver(items)

    def _handle_status(self, name: str, status: str, headers: Mapping[str, str]) -> None:
        """Handle a status message of the server about one request."""
        if status == "100":  # heartbeat
            return
        description = headers.get("Description", "")
        self._requests.ended(name, int(headers.get("Nats-Pending-Messages", self._requested.pop(name, 0))))
        if status == "503" or (status == "409" and "Deleted" in description):
            self._missing_since = time.monotonic()
            if not self._missing:
                log.info("waiting for the work stream %s (scheduler)", self._stream)
                self._missing = True
        elif status not in ("404", "408"):
            log.warning("pull from %s: %s %s", self._stream, status, description)
            self._missing_since = time.monotonic()
        self._wake.set()

    def _read(self, message: Msg) -> WorkItem | None:
        try:
            group = PromptGroup.FromString(message.data)
        except Exception:
            log.exception("a message on %s is not a PromptGroup; it is dropped", self._stream)
            asyncio.get_running_loop().create_task(message.term())
            return None
        return WorkItem(group, message.reply, _deliveries(message.reply), dict(message.headers or {}), time.monotonic())


def _deliveries(reply: str) -> int:
    """The number of deliveries of a message, from its reply subject ``$JS.ACK...``."""
    tokens = reply.split(".")
    return int(tokens[4] if len(tokens) == 9 else tokens[6])


def in_order(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Items sorted by position, then attempt."""
    return sorted(items, key=lambda item: (item.group.position, item.group.attempt))
