"""Work items from JetStream: pulled as capacity frees up, held with progress acks, acknowledged
when done.

A pull request is always outstanding for as many items as there is room for, so an item that is
published is on its way to a worker at once; JetStream deals the items out among the requests of all
workers.
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
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.reconnect import Silence

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
    """How many items the server still owes us.

    An item does not say which pull request it answers, so it is booked on the oldest one; a request
    that ends says how many items it did not get, which corrects the books: the sum is always right.
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
        """The server has closed a request, ``missing`` items short."""
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
        """deliver: is given the items that arrived together, on the event loop; must not block."""
        self._client, self._heartbeat, self._stream, self._deliver = client, heartbeat, stream, deliver
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{names.WORKERS_CONSUMER}"
        self._inbox = client.new_inbox()
        self._requests = _Requests()
        self._requested: dict[str, int] = {}  # of the last requests
        self._last_received = 0.0  # monotonic seconds
        self._room = 0
        self._serial = 0
        self._arrived: list[WorkItem] = []
        self._wake = asyncio.Event()
        self._missing_since = 0.0
        self._missing = False  # no server has answered for the stream since the last item
        self._silence = Silence(client, stream)
        self._task: asyncio.Task[None] | None = None
        self._subscription: Subscription | None = None

    @property
    def outstanding(self) -> int:
        """Items asked for that have not come."""
        return self._requests.items

    async def start(self) -> None:
        """Begin to listen; nothing is asked for before ``set_room``."""
        self._subscription = await self._client.subscribe(f"{self._inbox}.*", cb=self._receive, pending_msgs_limit=1 << 16)
        self._task = asyncio.create_task(self._keep_requesting(), name="work-queue")

    def set_room(self, items: int) -> None:
        """How many more items there is room for now. More are asked for at once; what was asked for
        already may still come."""
        self._room = items
        if items > self.outstanding:
            self._wake.set()

    def reconnected(self) -> None:
        """Requests of a lost connection are void: ask again."""
        self._requests.clear()
        self._wake.set()

    async def ack(self, items: Iterable[WorkItem]) -> None:
        """Done: the items will not be delivered again."""
        await self._settle(items, _ACK)

    async def give_back(self, items: Iterable[WorkItem]) -> None:
        """Return unfinished items to the stream, which delivers them to another worker at once."""
        await self._settle(items, _NAK)

    async def stop(self) -> None:
        """Ask for no more, and give back what still arrives. When this returns the server sends
        nothing here any more: items given back afterwards go to another worker, and not to a pull
        request that this one no longer reads."""
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
            except (NatsError, TimeoutError) as error:  # no server: nothing comes from it either
                log.debug("stop listening to %s: %r", self._stream, error)

    async def _settle(self, items: Iterable[WorkItem], verdict: bytes) -> None:
        for item in items:
            self._heartbeat.release(item.reply)
            try:
                await self._client.publish(item.reply, verdict)
            except NatsError as error:  # it comes again, and the buffer knows what it has
                log.debug("settle %s: %r", item.key, error)

    async def _keep_requesting(self) -> None:
        while True:
            now = time.monotonic()
            if self.outstanding and now > self._last_received + 3 * HEARTBEAT_SECONDS:  # no heartbeat: the server has lost them
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
            await self._silence.record(status == "503")
            return
        await self._silence.record(False)
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
        if len(self._arrived) == 1:  # the rest of what the socket holds comes before this is run
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        items, self._arrived = self._arrived, []
        if items:
            self._deliver(items)

    def _handle_status(self, name: str, status: str, headers: Mapping[str, str]) -> None:
        """A status of the server about one request."""
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
    """How often JetStream has delivered a message, from its reply subject ``$JS.ACK...``."""
    tokens = reply.split(".")
    return int(tokens[4] if len(tokens) == 9 else tokens[6])


def in_order(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Items by position, then attempt."""
    return sorted(items, key=lambda item: (item.group.position, item.group.attempt))
