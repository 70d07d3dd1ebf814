"""Feeds one tracker in its own thread, so that a tracker that hangs or fails does not affect the
others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rollout_workers.trackers.source import Source
from rollout_workers.trackers.types import LibraryMissing, Sink, record_of

log = logging.getLogger(__name__)

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between retries of a failing sink


@dataclass(slots=True)
class Tally:
    """Counts of one sink. written: records written. known: records that the tracker already had.
    failures: failed attempts."""

    where: str = ""
    written: int = 0
    known: int = 0
    failures: int = 0
    error: str = ""
    """The last failure; empty after a success."""
    done: bool = False
    """Whether all records up to the end of the run were written."""


class Feed:
    """Passes events from a source to a tracker. After a failure it reopens the tracker and
    continues after the last stored step."""

    def __init__(self, sink: Sink, source: Source, warn: Callable[[str, str], None], *, tries: int | None = None) -> None:
        """warn: called with (tracker, message) from the feed's thread on the first failure. tries:
        maximum number of attempts; None: unlimited."""
        self.name, self.tally = sink.name, Tally()
        self._sink, self._source, self._warn, self._tries = sink, source, warn, tries
        self._busy: float | None = None  # start of the current call into the tracker's library
        self._state, self._stopping = "", False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.thread = threading.Thread(target=self._main, name=f"sink-{sink.name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Finish the current record, close the sink, and end the thread. Returns at once; may be
        called from any thread."""
        self._stopping = True
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(self._task.cancel)

    def stuck(self, seconds: float) -> bool:
        """Whether the current call into the tracker's library has lasted longer than
        ``seconds``."""
        busy = self._busy
        return busy is not None and time.monotonic() - busy > seconds

    def _main(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        pause = _FIRST_PAUSE
        while not self._stopping:
            try:
                await self._once()
                return
            except asyncio.CancelledError:
                return
            except Exception as error:
                self._failed(error)
                if isinstance(error, LibraryMissing) or self.tally.failures == self._tries:
                    return
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                return
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _once(self) -> None:
        tally = self.tally
        tally.known = 0  # the source starts from the first event again
        self._state = ""
        tally.where = self._call(self._sink.open)
        try:
            async for event in self._source():
                if event.kind == "run.state":
                    self._state = event.attributes["state"]
                    continue
                record = record_of(event)
                if record is None:
                    continue
                if self._call(lambda record=record: self._sink.write(record)):
                    tally.written += 1
                    tally.error = ""
                else:
                    tally.known += 1
            tally.done = True
        finally:
            self._call(lambda: self._sink.close(self._state if tally.done else ""))
        tally.error = ""

    def _call(self, work: Callable[[], T]) -> T:
        self._busy = time.monotonic()
        try:
            return work()
        finally:
            self._busy = None

    def _failed(self, error: Exception) -> None:
        tally = self.tally
        tally.failures += 1
        tally.done = False
        tally.error = f"{type(error).__name__}: {error}" if not isinstance(error, LibraryMissing) else str(error)
        log.warning("the sink %s failed: %s", self.name, tally.error, exc_info=tally.failures == 1)
        if tally.failures == 1:
            self._warn(self.name, tally.error)
