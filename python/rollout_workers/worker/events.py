"""Events on their way to the event log: batched, sent by the heartbeat thread, never waited for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from nats.errors import Error as NatsError

from rollout.event.v1 import event_pb2 as pb
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.repeated_logs import Repeats
from rollout_workers.worker.spec import Identity

_FLUSH_SECONDS = 0.2
_MOST_HELD = 10_000
_MOST_IN_BATCH = 500
_MOST_MESSAGE = 8_000  # characters of one line
_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_LEVELS = (
    (logging.ERROR, pb.LEVEL_ERROR),
    (logging.WARNING, pb.LEVEL_WARN),
    (logging.INFO, pb.LEVEL_INFO),
)


def ulid(milliseconds: int) -> str:
    """A ULID, lowercase as all ids are: 48 bits of time, 80 random ones."""
    number = milliseconds << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


class Events:
    """Collects events from any thread and publishes them every 200 ms. When NATS is away the oldest
    go first."""

    def __init__(self, who: Identity, heartbeat: Heartbeat) -> None:
        self._who, self._heartbeat = who, heartbeat
        self._held: deque[pb.Event] = deque(maxlen=_MOST_HELD)
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
        """Say what happened. Returns at once.

        Of warnings that say the same, numbers and quoted texts aside, one in ten seconds is sent,
        with ``repeated`` among its attributes: how many it stands for.
        """
        now = time.time_ns()
        event = pb.Event(
            event_id=ulid(now // 1_000_000),
            run_id=self._who.run,
            service=self._who.speaker,
            level=level,
            kind=kind,
            message=message[:_MOST_MESSAGE],
            step=step,
            attributes=attributes,
            metrics=metrics,
        )
        event.time.FromNanoseconds(now)
        if level < pb.LEVEL_WARN or self._repeats.admit(f"{kind}/{level}", message, event):
            self._held.append(event)

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
            self._held.append(event)

    async def _keep_sending(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            self._release()
            await self._send_all()

    async def _send_all(self) -> None:
        client = await self._heartbeat.client()
        while self._held:
            batch = [self._held.popleft() for _ in range(min(len(self._held), _MOST_IN_BATCH))]
            payload = pb.EventBatch(events=batch).SerializeToString()
            try:
                await client.request(self._who.event_subject, payload, timeout=2)
            except (NatsError, TimeoutError):
                self._held.extendleft(reversed(batch[: _MOST_HELD - len(self._held)]))
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
