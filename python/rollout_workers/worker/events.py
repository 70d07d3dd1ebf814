"""Sends events to the event log in batches, from the heartbeat thread. Callers never wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nats.errors import Error as NatsError

from rollout.event.v1 import event_pb2 as pb
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.spec import Identity

T = TypeVar("T")

REPEAT_SECONDS = 10.0
"""Of equal warnings, one is sent in this time."""
_FLUSH_SECONDS = 0.2
_MOST_BUFFERED = 10_000
_MOST_IN_BATCH = 500
_MOST_MESSAGE = 8_000  # characters of one event
_MOST_KINDS = 1_000
# The parts of a message that vary: numbers and quoted texts. An apostrophe inside a word is not a
# quote.
_VARIES = re.compile(r"\B'[^']*'|\"[^\"]*\"|[0-9]+")
_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_LEVELS = (
    (logging.ERROR, pb.LEVEL_ERROR),
    (logging.WARNING, pb.LEVEL_WARN),
    (logging.INFO, pb.LEVEL_INFO),
)


def ulid(milliseconds: int) -> str:
    """A ULID in lower case, like all ids: 48 bits of time and 80 random bits."""
    number = milliseconds << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


@dataclass(slots=True)
class _Kind(Generic[T]):
    sent: float  # monotonic seconds
    count: int = 0  # items that were not sent since then
    last: T | None = None  # the newest of those


class Repeats(Generic[T]):
    """Thins out repeated messages: sends the first of a kind, then one per ``REPEAT_SECONDS`` with
    a count. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[str, _Kind[T]] = {}
        self._lock = threading.Lock()

    def admit(self, source: str, message: str, item: T) -> bool:
        """Whether to send the item now. If not, the item is counted, and ``due`` returns the newest
        item of its kind."""
        key = f"{source}\0{_VARIES.sub('#', message.partition(chr(10))[0])}"
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                if len(self._kinds) >= _MOST_KINDS:
                    return True
                self._kinds[key] = _Kind(self._clock())
                return True
            kind.count += 1
            kind.last = item
            return False

    def due(self, *, all: bool = False) -> Iterator[tuple[T, int]]:
        """The newest unsent item of each kind and the number of items that it stands for.

        An item is due ``REPEAT_SECONDS`` after the last one of its kind was sent; with ``all``,
        now. After that time without items a kind is forgotten, and its next item is sent at once.
        """
        with self._lock:
            now = self._clock()
            out: list[tuple[T, int]] = []
            for key, kind in list(self._kinds.items()):
                if now < kind.sent + REPEAT_SECONDS and not all:
                    continue
                if kind.last is None:
                    del self._kinds[key]
                    continue
                out.append((kind.last, kind.count))
                kind.sent, kind.count, kind.last = now, 0, None
        yield from out


class Events:
    """Collects events from any thread and publishes them every 200 ms. While NATS is unreachable,
    the buffer keeps the newest events and drops the oldest."""

    def __init__(self, who: Identity, heartbeat: Heartbeat) -> None:
        self._who, self._heartbeat = who, heartbeat
        self._buffered: deque[pb.Event] = deque(maxlen=_MOST_BUFFERED)
        self._task: Any = None
        self._repeats: Repeats[pb.Event] = Repeats()

    def start(self) -> None:
        self._task = self._heartbeat.submit(self._keep_sending())

    def emit(
        self,
        kind: str,
        message: str = "",
        *,
        level: pb.Level.ValueType = pb.LEVEL_INFO,
        step: int = 0,
        attributes: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Record an event. Returns at once.

        Warnings that differ only in numbers and quoted texts are sent once in ten seconds; the
        attribute ``repeated`` counts them.
        """
        now = time.time_ns()
        event = pb.Event(
            event_id=ulid(now // 1_000_000),
            run_id=self._who.run,
            service=self._who.event_source,
            level=level,
            kind=kind,
            message=message[:_MOST_MESSAGE],
            step=step,
            attributes=attributes,
            metrics=metrics,
        )
        event.time.FromNanoseconds(now)
        if level < pb.LEVEL_WARN or self._repeats.admit(f"{kind}/{level}", message, event):
            self._buffered.append(event)

    def close(self, seconds: float = 2.0) -> None:
        """Send the buffered events, for at most ``seconds``."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._release(all=True)
        with contextlib.suppress(Exception):
            self._heartbeat.submit(self._send_all()).result(seconds)

    def _release(self, *, all: bool = False) -> None:
        for event, count in self._repeats.due(all=all):
            event.attributes["repeated"] = str(count)
            self._buffered.append(event)

    async def _keep_sending(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            self._release()
            await self._send_all()

    async def _send_all(self) -> None:
        client = await self._heartbeat.client()
        while self._buffered:
            batch = [self._buffered.popleft() for _ in range(min(len(self._buffered), _MOST_IN_BATCH))]
            payload = pb.EventBatch(events=batch).SerializeToString()
            try:
                await client.request(self._who.event_subject, payload, timeout=2)
            except (NatsError, TimeoutError):
                self._buffered.extendleft(reversed(batch[: _MOST_BUFFERED - len(self._buffered)]))
                await asyncio.sleep(1)
                return


class EventHandler(logging.Handler):
    """Sends records of ``logging`` as events of kind ``log``."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
            if record.exc_info:
                message += "\n" + (self.formatter or logging.Formatter()).formatException(record.exc_info)
            level = next((event for least, event in _LEVELS if record.levelno >= least), pb.LEVEL_DEBUG)
            self._events.emit("log", message, level=level, attributes={"logger": record.name})
        except Exception:
            self.handleError(record)
