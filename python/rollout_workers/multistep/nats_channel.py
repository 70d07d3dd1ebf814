"""A :class:`Channel` between processes, over NATS.

The sender of a key keeps each item until the receiver has taken it, and publishes it again if it
does not arrive, so nothing is lost with a connection or a broker. The receiver drops what it
already has and puts items in order. Both show signs of life. docs/wire.md has the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from rollout import names
from rollout.tensor.v1 import exchange_pb2 as pb
from rollout_workers.multistep.channel import CAPACITY
from rollout_workers.multistep.errors import ChannelClosed, ChannelFull, KeyInvalid, PeerLost
from rollout_workers.multistep.values import decode_item, encode_item

log = logging.getLogger(__name__)

SILENCE_SECONDS = 15.0
BEAT_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_MOST_RESEND_SECONDS = 8.0
_HEADER_BYTES = 1024  # of a part, apart from its data
_WINDOW_BYTES = 16 << 20  # of a key that may be on their way; less than a broker holds for a slow connection
_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")


class _Part:
    """A part of an item that the receiver has not taken. due: when to publish it, monotonic."""

    __slots__ = ("data", "due", "last", "wait")

    def __init__(self, data: bytes, last: bool, wait: float) -> None:
        self.data, self.last, self.due, self.wait = data, last, 0.0, wait


class _Outgoing:
    """The sender's side of a key."""

    def __init__(self) -> None:
        self.parts: dict[int, _Part] = {}  # by sequence, in order
        self.items = 0  # that were not taken
        self.last = self.received = 0  # sequences
        self.receiver = ""
        self.heard = time.monotonic()
        self.changed = asyncio.Event()
        self.acks: Subscription | None = None

    @property
    def first(self) -> int:
        return next(iter(self.parts), self.last + 1)

    @property
    def arrived(self) -> bool:
        return self.received >= self.last

    def window(self) -> Iterator[tuple[int, _Part]]:
        """The parts that have not arrived and may be on their way at once."""
        size = 0
        for sequence in range(max(self.received + 1, self.first), self.last + 1):
            part = self.parts[sequence]
            size += len(part.data)
            if size > _WINDOW_BYTES and size > len(part.data):
                return
            yield sequence, part


class _Source:
    """A sender as the receiver of a key knows it. pieces: of the item whose end has not arrived.
    ahead: parts behind a gap."""

    def __init__(self, first: int) -> None:
        self.received = self.taken = first - 1
        self.pieces: list[bytes] = []
        self.ahead: dict[int, pb.Part] = {}
        self.closed = self.reported = False
        self.heard = 0.0

    def skip(self, first: int) -> None:
        """Another receiver has taken what is before ``first``."""
        if first - 1 > self.received:
            self.received, self.pieces = first - 1, []
            self.ahead = {n: part for n, part in self.ahead.items() if n >= first}

    def add(self, part: pb.Part) -> Iterator[tuple[int, bytes]]:
        """Add a part, and return the items that it completes, with the sequences of their ends."""
        self.ahead[part.sequence] = part
        while (following := self.ahead.pop(self.received + 1, None)) is not None:
            self.received += 1
            self.pieces.append(following.data)
            if following.last:
                yield self.received, b"".join(self.pieces)
                self.pieces = []


class _Incoming:
    """The receiver's side of a key."""

    def __init__(self) -> None:
        self.sources: dict[str, _Source] = {}
        self.queue: deque[tuple[str, int, bytes]] = deque()
        self.heard = time.monotonic()
        self.changed = asyncio.Event()
        self.items: Subscription | None = None
        self.unacknowledged: set[str] = {""}  # senders; "" greets all of them


class NatsChannel:
    """A :class:`Channel` on a connection that the caller owns. Belongs to one event loop."""

    def __init__(
        self,
        client: Client,
        run: str,
        name: str,
        *,
        capacity: int = CAPACITY,
        silence_seconds: float = SILENCE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        resend_seconds: float = 0.5,
    ) -> None:
        """name: of the channel within the run. silence_seconds: after which the other side of a key
        counts as lost. beat_seconds: between two signs of life. resend_seconds: after which an item
        that has not arrived is published again; doubled each time, up to 8 s. Raises
        :class:`KeyInvalid`."""
        self._client, self._name = client, _token(name)
        self._items = f"{names.exchange_subject(_token(run))}.{name}"
        self._acks = f"{names.exchange_acks_subject(run)}.{name}"
        self._capacity, self._silence, self._beat, self._resend = capacity, silence_seconds, beat_seconds, resend_seconds
        self._me = secrets.token_hex(8)
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: dict[str, _Incoming] = {}
        self._wake = asyncio.Event()
        self._beaten = 0.0
        self._closing = self._closed = False
        self._task = asyncio.create_task(self._run_until_closed(), name=f"channel {name}")

    def put(self, item: Any, key: str) -> None:
        if self._closing:
            raise ChannelClosed(key)
        outgoing = self._sender(key)
        if outgoing.items >= self._capacity:
            raise ChannelFull(key, self._capacity)
        data = encode_item(item)
        size = max(1, self._client.max_payload - _HEADER_BYTES)
        for start in range(0, len(data) or 1, size):
            outgoing.last += 1
            outgoing.parts[outgoing.last] = _Part(data[start : start + size], start + size >= len(data), self._resend)
        outgoing.items += 1
        self._wake.set()

    async def room(self, key: str) -> None:
        outgoing = self._sender(key)
        since = time.monotonic()
        while outgoing.items >= self._capacity and not self._closing:
            await self._alive(key, outgoing, since, "receiver")
        if self._closing:
            raise ChannelClosed(key)

    async def get(self, key: str) -> Any:
        incoming = self._incoming.get(key)
        if incoming is None:
            incoming = self._incoming[_token(key)] = _Incoming()
            self._wake.set()
        while not incoming.queue:
            if self._closing:
                raise ChannelClosed(key)
            for source in incoming.sources.values():
                if source.closed and not source.reported:
                    source.reported = True
                    incoming.heard = time.monotonic()
                    raise ChannelClosed(key)
            await self._alive(key, incoming, 0.0, "sender")
        sender, sequence, data = incoming.queue.popleft()
        incoming.sources[sender].taken = sequence
        incoming.unacknowledged.add(sender)
        self._wake.set()
        return decode_item(data)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        for side in (*self._outgoing.values(), *self._incoming.values()):
            side.changed.set()
        left: list[str] = []
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                while left := [key for key, outgoing in self._outgoing.items() if not outgoing.arrived]:
                    outgoing = self._outgoing[left[0]]
                    outgoing.changed.clear()
                    await outgoing.changed.wait()
        except TimeoutError:
            pass
        finally:
            self._closed = True
            self._wake.set()
            await asyncio.wait([self._task], timeout=_CLOSE_SECONDS)
            self._task.cancel()
        if left:
            raise PeerLost(f"items of the keys {', '.join(sorted(left))} did not arrive within {_CLOSE_SECONDS:g} s")

    async def _alive(self, key: str, side: _Outgoing | _Incoming, since: float, who: str) -> None:
        """Wait until something of the key has changed. Raises :class:`PeerLost`."""
        side.changed.clear()
        left = max(side.heard, since) + self._silence - time.monotonic()
        try:
            async with asyncio.timeout(max(left, 0)):
                await side.changed.wait()
        except TimeoutError:
            if time.monotonic() - max(side.heard, since) < self._silence:
                return
            side.heard = time.monotonic()  # a later call waits again
            message = f"the {who} of the key {key!r} has shown no life for {self._silence:g} s"
            raise PeerLost(message, fix="is its process running, and connected to the same NATS?") from None

    def _sender(self, key: str) -> _Outgoing:
        outgoing = self._outgoing.get(key)
        if outgoing is None:
            outgoing = self._outgoing[_token(key)] = _Outgoing()
        return outgoing

    # What follows runs in the channel's task, except what NATS calls.

    async def _run_until_closed(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._send()
            except (NatsError, OSError) as error:
                log.debug("can't send on the channel %s: %r", self._name, error)
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception:
                log.exception("the channel %s failed to send", self._name)
                await asyncio.sleep(_RETRY_SECONDS)
        await self._leave()

    def _pause(self) -> float:
        due = [part.due for outgoing in self._outgoing.values() for _, part in outgoing.window()]
        return max(0.0, min(self._beaten + self._beat, *due, float("inf")) - time.monotonic())

    async def _send(self) -> None:
        await self._listen()
        for key, incoming in list(self._incoming.items()):
            while incoming.unacknowledged:
                await self._acknowledge(key, incoming, next(iter(incoming.unacknowledged)))
        for key, outgoing in list(self._outgoing.items()):
            for sequence, part in list(outgoing.window()):
                if sequence > outgoing.received and part.due <= time.monotonic():
                    part.due, part.wait = time.monotonic() + part.wait, min(2 * part.wait, _MOST_RESEND_SECONDS)
                    await self._publish(key, outgoing, sequence, part)
        if time.monotonic() >= self._beaten + self._beat:
            self._beaten = time.monotonic()
            for key, outgoing in list(self._outgoing.items()):
                await self._publish(key, outgoing)
            for incoming in self._incoming.values():
                alive = {sender for sender, source in incoming.sources.items() if source.heard > self._beaten - self._silence}
                incoming.unacknowledged |= alive or {""}
            self._wake.set()

    async def _listen(self) -> None:
        for key, incoming in list(self._incoming.items()):
            if incoming.items is None:
                subject = f"{self._items}.{key}"
                incoming.items = await self._client.subscribe(subject, cb=self._handler(self._on_part, key))
        for key, outgoing in list(self._outgoing.items()):
            if outgoing.acks is None:
                subject = f"{self._acks}.{key}"
                outgoing.acks = await self._client.subscribe(subject, cb=self._handler(self._on_acknowledgment, key))

    async def _publish(
        self, key: str, outgoing: _Outgoing, sequence: int = 0, part: _Part | None = None, *, closed: bool = False
    ) -> None:
        """Publish a part, or a sign of life."""
        message = pb.Part(sender=self._me, sequence=sequence, first=outgoing.first, closed=closed)
        if part is not None:
            message.data, message.last = part.data, part.last
        await self._client.publish(f"{self._items}.{key}", message.SerializeToString())

    async def _acknowledge(self, key: str, incoming: _Incoming, sender: str) -> None:
        source = incoming.sources.get(sender)
        ack = pb.Acknowledgment(receiver=self._me, sender=sender)
        if source is not None:
            ack.received, ack.taken = source.received, source.taken
        incoming.unacknowledged.discard(sender)
        try:
            await self._client.publish(f"{self._acks}.{key}", ack.SerializeToString())
        except BaseException:
            incoming.unacknowledged.add(sender)
            raise

    async def _leave(self) -> None:
        """Say that nothing follows, and stop listening."""
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            for key, outgoing in self._outgoing.items():
                await self._publish(key, outgoing, closed=True)
            for subscription in self._subscriptions():
                await subscription.unsubscribe()
            await self._client.flush(timeout=1)

    def _subscriptions(self) -> Iterator[Subscription]:
        for subscription in (*(o.acks for o in self._outgoing.values()), *(i.items for i in self._incoming.values())):
            if subscription is not None:
                yield subscription

    def _handler(self, handle: Any, key: str) -> Any:
        async def on_message(message: Msg) -> None:
            try:
                handle(key, message.data)
            except DecodeError as error:
                log.warning("a message on %s has the wrong form: %s", message.subject, error)

        return on_message

    def _on_part(self, key: str, data: bytes) -> None:
        part, incoming = pb.Part.FromString(data), self._incoming[key]
        source = incoming.sources.get(part.sender)
        if source is None:
            source = incoming.sources[part.sender] = _Source(part.first)
        source.heard = incoming.heard = time.monotonic()
        source.skip(part.first)
        if part.sequence:
            if part.sequence > source.received:
                incoming.queue.extend((part.sender, end, item) for end, item in source.add(part))
            incoming.unacknowledged.add(part.sender)
            self._wake.set()
        source.closed = source.closed or part.closed
        incoming.changed.set()

    def _on_acknowledgment(self, key: str, data: bytes) -> None:
        ack, outgoing = pb.Acknowledgment.FromString(data), self._outgoing[key]
        outgoing.heard = time.monotonic()
        if ack.receiver != outgoing.receiver:  # it has nothing of what is kept here
            outgoing.receiver, outgoing.received = ack.receiver, outgoing.first - 1
            for part in outgoing.parts.values():
                part.due, part.wait = 0.0, self._resend
        if ack.sender == self._me:
            outgoing.received = max(outgoing.received, ack.received)
            for sequence in [n for n in outgoing.parts if n <= ack.taken]:
                outgoing.items -= outgoing.parts.pop(sequence).last
        outgoing.changed.set()
        self._wake.set()


def _token(text: str) -> str:
    if not _KEY.fullmatch(text):
        raise KeyInvalid(f"{text!r} can't be a key, a channel, or a run", fix="use at most 64 letters, digits, `_`, and `-`")
    return text
